"""The numbers of K/V heads that were chosen for a budget of K/V cache, and what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from gqa_convert.checkpoint.results import Result
from gqa_convert.measuring.sensitivity.kv_budget import LayerCosts


@dataclass(frozen=True, slots=True)
class HeadAllocation:
    """A number of K/V heads for each layer that stays within the budget.

    Attributes:
        rule: how it was found.
        groups: the numbers, in the order of the layers.
        kv_bytes_per_token: what they take over all layers.
        kl: the KL divergence from the source in nats per token on held-out text, with all layers merged; None where it is
            not finite.
    """

    rule: str
    groups: tuple[int, ...]
    kv_bytes_per_token: int
    kl: float | None


@dataclass(frozen=True, slots=True)
class BudgetChoice(Result):
    """What `choose_num_kv_heads` found.

    Attributes:
        stated: the budget as the user wrote it.
        limit_kv_bytes_per_token: the most bytes that it allows.
        source_kv_bytes_per_token: those of the source.
        kv_bytes_per_token: those of the chosen numbers.
        groups: the chosen numbers; one alone if all layers have the same.
        chosen: the rule that found them.
        margin: a list is chosen where its divergence is below this share of the uniform number's.
        merged_by: how layers were merged for the measurement.
        candidates: what was compared, the uniform number first.
        layers: what merging costs in each layer alone, in the order of the layers.
        text: a description of the text.
        held_out_tokens: of this text, on which candidates were compared.
        warning: about the text, or None.
    """

    stated: str
    limit_kv_bytes_per_token: int
    source_kv_bytes_per_token: int
    kv_bytes_per_token: int
    groups: int | list[int]
    chosen: str
    margin: float
    merged_by: str
    candidates: list[HeadAllocation]
    layers: list[LayerCosts]
    text: str
    held_out_tokens: int
    warning: str | None

    @property
    def reason(self) -> str:
        """The chosen numbers and how they compare, as a clause."""
        numbers = str(self.groups).strip("[]").replace(" ", "")
        share = self.kv_bytes_per_token / self.source_kv_bytes_per_token
        compared = ", ".join(f"{each.rule} {number_text(each.kl)}" for each in self.candidates)
        return (
            f"--groups {numbers}, {self.kv_bytes_per_token:,} bytes ({share:.1%}); KL divergence from the source in nats "
            f"per token on {self.held_out_tokens:,} held-out tokens, all layers merged by {self.merged_by}: {compared}"
        )


def number_text(kl: float | None) -> str:
    return "not finite" if kl is None else f"{kl:.4f}"


def choose_candidate(candidates: Sequence[HeadAllocation], margin: float) -> HeadAllocation:
    """The list where its divergence is below the uniform number's times `margin`, else the uniform number.

    Args:
        candidates: the uniform number first, then the list, unless it is the same.
        margin: a share, at most 1.
    """
    uniform, best = candidates[0], candidates[-1]
    if best.kl is not None and (uniform.kl is None or best.kl < margin * uniform.kl):
        return best
    return uniform
