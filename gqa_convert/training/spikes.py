"""Recognises steps whose loss or gradient norm jumps, which are skipped.

The decision of a step is a function of the numbers of the steps before it, which are the same on all processes and are
saved with a checkpoint. A resumed run therefore decides as an uninterrupted one does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from gqa_convert.errors import RecipeError
from gqa_convert.text.keys import key, read_mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeRule:
    """The keys of a recipe's `spike`."""

    loss_factor: float | None = key(
        "A step jumps if its loss is this many times the median of the window; `null` for any loss.",
        default=1.5,
        above=1,
    )
    norm_factor: float | None = key(
        "A step jumps if its gradient norm is this many times the median of the window; `null` for any norm.",
        default=5.0,
        above=1,
    )
    window: int = key(
        "How many of the latest steps without a jump the medians are of; the rule begins when there are so many.",
        default=50,
        least=2,
        most=10_000,
        unit="steps",
    )
    action: Literal["skip", "rewind"] = key(
        "What follows after `patience` jumps in a row: `skip` accepts the new level, `rewind` returns to the weights and "
        "moments of a checkpoint from before them. Either way the text of the skipped steps is not used again, and a new "
        "window begins.",
        default="skip",
    )
    patience: int = key("How many steps in a row may jump.", default=3, most=1000, unit="steps")


def read_spike_rule(where: str, value: Any) -> SpikeRule:
    """A rule from the value of a recipe key.

    Raises:
        RecipeError: it is no mapping, a key of it is unknown or not allowed, or it has no factor.
    """
    rule = read_mapping(SpikeRule, where, value, "{window: 50, action: rewind}")
    if rule.loss_factor is None and rule.norm_factor is None:
        raise RecipeError(f"{where} has neither a loss_factor nor a norm_factor: give one of them, or remove {where}")
    return rule


@dataclass
class SpikeState:
    """What a rule remembers."""

    losses: list[float] = field(default_factory=list)
    """Of the latest steps that did not jump."""
    norms: list[float] = field(default_factory=list)
    in_a_row: int = 0
    """Consecutive steps that jumped, up to the last step."""
    skipped: int = 0
    """All steps that jumped."""
    rewinds: int = 0


def limit(factor: float | None, rule: SpikeRule, numbers: Sequence[float]) -> float | None:
    """The number above which a step jumps; None while there is no limit."""
    return None if factor is None or len(numbers) < rule.window else factor * median(numbers)


def jumps(number: float, factor: float | None, rule: SpikeRule, numbers: Sequence[float]) -> bool:
    """Whether the loss or the gradient norm of a step jumps, given those of the window."""
    most = limit(factor, rule, numbers)
    return most is not None and number > most


def note(rule: SpikeRule, state: SpikeState, loss: float, norm: float, *, jumped: bool) -> bool:
    """Remember a step; returns whether the run returns to a checkpoint after it."""
    if not jumped:
        state.losses, state.norms = [*state.losses, loss][-rule.window :], [*state.norms, norm][-rule.window :]
        state.in_a_row = 0
        return False
    state.skipped += 1
    state.in_a_row += 1
    if state.in_a_row < rule.patience:
        return False
    state.losses, state.norms, state.in_a_row = [], [], 0
    return rule.action == "rewind"
