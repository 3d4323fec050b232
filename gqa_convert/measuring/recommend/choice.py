"""Constraints on the number of K/V heads, and the choice among candidates."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from gqa_convert.errors import OptionError

Part = Literal["loss", "speed", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """A user's constraints, named like the options of the command line.

    Raises:
        OptionError: there is no constraint, a value is out of range, or a memory budget lacks a context.
    """

    max_loss_increase: float | None = None
    """Loss increase over the source, in nats per token."""
    min_speedup: float | None = None
    """Speed-up of a decode step over the source, a factor above 1."""
    memory: int | None = None
    """Budget in bytes for the weights and the K/V cache."""
    context: int | None = None
    """Tokens in each sequence's cache; for an encoder-decoder, in the decoder's."""
    batch: int = 1
    """Sequences that are decoded at once."""
    encoder_tokens: int | None = None
    """Input tokens of an encoder-decoder; by default the fixed length of its encoder, or else `context`."""

    def __post_init__(self) -> None:
        loss, speed = self.max_loss_increase, self.min_speedup
        if loss is None and speed is None and self.memory is None:
            raise OptionError(
                "there is no constraint on N: give --max-loss-increase NATS, --min-speedup FACTOR or --memory SIZE, or several of them"
            )
        if loss is not None and not (math.isfinite(loss) and loss >= 0):
            raise OptionError(f"--max-loss-increase {loss:g} is not a loss: give nats per token, such as 0.02")
        if speed is not None and not (math.isfinite(speed) and speed > 1):
            raise OptionError(f"--min-speedup {speed:g} is not a speed-up: give a factor above 1, such as 2")
        if self.memory is not None and self.context is None:
            raise OptionError(
                f"--memory {self.memory:,} bytes without --context: say how many tokens the K/V cache holds, such as 32k"
            )
        counts = (
            ("--memory", self.memory),
            ("--context", self.context),
            ("--batch", self.batch),
            ("--encoder-tokens", self.encoder_tokens),
        )
        for option, count in counts:
            if count is not None and count < 1:
                raise OptionError(f"{option} {count} is too small: give 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A number of K/V heads with its loss, speed and memory; None for unknown values."""

    groups: int
    is_source: bool = False
    """Whether this is the source itself, without merging."""
    loss_increase: float | None = None
    """Loss increase over the source, in nats per token."""
    loss_interval: tuple[float, float] | None = None
    """Where the increase is expected, if it is a prediction. The upper end counts for a limit."""
    speedup: float | None = None
    """Speed-up of a decode step over the source."""
    memory_bytes: int | None = None
    """Bytes of the weights and the K/V cache."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One constraint."""

    part: Part
    option: str
    """The option and its value, as the user stated them."""
    bound: float
    value: Callable[[Candidate], float | None]
    upper: bool
    """Whether the bound is an upper one, which values may not exceed, or a lower one, which they must reach."""
    words: Callable[[Candidate], str]
    """Words for a candidate whose value is known, as the end of a sentence about it."""
    unit: Callable[[float], str]
    """Words for a difference of values."""

    def met(self, candidate: Candidate) -> bool:
        """Whether a candidate meets the constraint; an unknown value does not."""
        value = self.value(candidate)
        return value is not None and (value <= self.bound if self.upper else value >= self.bound)

    def excess(self, candidate: Candidate) -> float:
        """By how much a candidate misses the constraint; infinite for an unknown value."""
        value = self.value(candidate)
        return math.inf if value is None else value - self.bound if self.upper else self.bound - value

    def describe(self, candidate: Candidate) -> str:
        """A candidate's value in words."""
        value = self.value(candidate)
        return f"has no known {self.part}" if value is None else self.words(candidate)

    def describe_shortfall(self, candidate: Candidate) -> str:
        """A candidate's value, and by how much it misses the constraint, in words."""
        if self.value(candidate) is None:
            return self.describe(candidate)
        most = "up to " if self.part == "loss" and candidate.loss_interval else ""
        gap = self.unit(self.excess(candidate))
        return f"{self.describe(candidate)}, {most}{gap} {'more' if self.upper else 'less'} than {self.option}"


def limits(constraints: Constraints) -> list[Limit]:
    """The constraints that are stated."""
    found: list[Limit] = []
    loss, speed, memory = constraints.max_loss_increase, constraints.min_speedup, constraints.memory
    if loss is not None:
        found.append(
            Limit(
                "loss",
                f"--max-loss-increase {loss:g}",
                loss,
                _highest_loss,
                True,
                _loss_words,
                lambda gap: f"{gap:.2g}",
            )
        )
    if speed is not None:
        found.append(
            Limit(
                "speed",
                f"--min-speedup {speed:g}",
                speed,
                lambda each: each.speedup,
                False,
                lambda each: f"decodes {each.speedup:.3g}x as fast",
                lambda gap: f"{gap:.2g}",
            )
        )
    if memory is not None:
        found.append(
            Limit(
                "memory",
                f"--memory {_bytes(memory)}",
                memory,
                lambda each: each.memory_bytes,
                True,
                lambda each: f"takes {_bytes(each.memory_bytes or 0)}",
                _bytes,
            )
        )
    return found


def _highest_loss(candidate: Candidate) -> float | None:
    """The loss increase, the upper end of its interval if it is a prediction."""
    return candidate.loss_increase if candidate.loss_interval is None else candidate.loss_interval[1]


def _loss_words(candidate: Candidate) -> str:
    if candidate.loss_interval is None:
        return f"loses {candidate.loss_increase:+.3g} nats per token"
    low, high = candidate.loss_interval
    return f"is predicted to lose {candidate.loss_increase:+.2g} ({low:.2g} to {high:.2g}) nats per token after fit"


def failing(candidate: Candidate, constraints: Constraints) -> list[Part]:
    """The constraints that a candidate does not meet."""
    return [limit.part for limit in limits(constraints) if not limit.met(candidate)]


def choose(candidates: Sequence[Candidate], constraints: Constraints) -> tuple[int | None, str]:
    """The number of K/V heads that meets the constraints, and the reason.

    For a limit on the loss alone, this is the smallest N within the limit. For speed or memory it is the largest N that
    meets every constraint, since fewer heads lose more. The source itself is a candidate where memory is constrained
    and speed is not.

    Args:
        candidates: in ascending order of N.
        constraints: of the user.

    Returns:
        N, None if no candidate meets all constraints, and a sentence.
    """
    asked = limits(constraints)
    parts = {limit.part for limit in asked}
    loss_alone = parts == {"loss"}
    able = [each for each in candidates if not each.is_source or ("memory" in parts and "speed" not in parts)]
    tried = ", ".join(str(each.groups) for each in able)
    fitting = [each for each in able if all(limit.met(each) for limit in asked)]
    if not fitting:
        return None, _conflict(able, asked)
    chosen = fitting[0] if loss_alone else fitting[-1]
    place = able.index(chosen)
    named = _listed([limit.option for limit in asked])
    states = _listed([limit.describe(chosen) for limit in asked])
    if chosen.is_source:
        return (
            chosen.groups,
            f"N = {chosen.groups}, the source itself, meets {named} already: it {states}; nothing has to be merged",
        )
    better = (
        able[place - 1]
        if loss_alone and place
        else able[place + 1]
        if not loss_alone and place + 1 < len(able)
        else None
    )
    what = "the smallest" if loss_alone else "the largest"
    reason = f"N = {chosen.groups} is {what} of {tried} that meets {named}: it {states}"
    if better is not None:
        reason += f"; N = {better.groups} {_listed([limit.describe_shortfall(better) for limit in asked if not limit.met(better)])}"
    return chosen.groups, reason


def _conflict(candidates: Sequence[Candidate], asked: Sequence[Limit]) -> str:
    """A sentence on the N that meet each constraint and those that come nearest to meeting all."""
    tried = ", ".join(str(each.groups) for each in candidates)
    if len(asked) == 1:
        return f"none of N = {tried} meets {asked[0].option}: {_nearest(candidates, asked[0])}"
    met = {limit.option: [str(each.groups) for each in candidates if limit.met(each)] for limit in asked}
    parts = [f"{option} is met by {'N = ' + ', '.join(groups) if groups else 'none'}" for option, groups in met.items()]
    near = []
    for limit in asked:
        others = [other for other in asked if other is not limit]
        pool = [each for each in candidates if all(other.met(each) for other in others)]
        if pool:
            near.append(f"of those that meet {_listed([other.option for other in others])}, {_nearest(pool, limit)}")
        elif not met[limit.option]:
            near.append(_nearest(candidates, limit))
    return "; ".join(
        [
            f"none of N = {tried} meets {_listed([limit.option for limit in asked])} together: {parts[0]}",
            *parts[1:],
            *near,
        ]
    )


def _nearest(candidates: Sequence[Candidate], limit: Limit) -> str:
    """A sentence on the candidate that misses a constraint by least."""
    nearest = min(candidates, key=lambda each: (limit.excess(each), -each.groups))
    if limit.value(nearest) is None:
        return f"no {limit.part} is known"
    return f"N = {nearest.groups} comes nearest: it {limit.describe_shortfall(nearest)}"


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _bytes(count: float) -> str:
    """Bytes with more digits than in a table, since a budget may be missed by little."""
    power = min(3, max(0, (len(str(int(abs(count)))) - 1) // 3))
    return f"{count / 1000**power:,.5g} {('bytes', 'kB', 'MB', 'GB')[power]}"
