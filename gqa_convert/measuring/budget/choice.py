"""The chosen numbers of K/V heads, and what was measured on the way."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from gqa_convert.checkpoint.strict_json import JsonObject

FIT_MARGIN: Final = 0.95
"""What a list's divergence after short fits must be, as a share of the uniform number's, to be chosen: a short fit is not
the whole fit.
"""


class Rule(StrEnum):
    """How the numbers of a candidate were found."""

    UNIFORM = "uniform"
    SUM = "least sum of divergences"
    ROOTS = "least sum of their square roots"
    EXCHANGES = "exchanges of heads between layers"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A number of K/V heads for each layer that stays within the budget.

    Attributes:
        rule: how it was found.
        groups: the numbers, in the order of the layers.
        kv_bytes_per_token: what they take over all layers.
        kl: the KL divergence from the source in nats per token on held-out text, with all layers merged; infinite where
            the copy yields NaN or Inf.
    """

    rule: Rule
    groups: tuple[int, ...]
    kv_bytes_per_token: int
    kl: float


@dataclass(frozen=True, slots=True)
class BudgetChoice:
    """What `choose_groups` found.

    Attributes:
        stated: the budget as the user wrote it.
        limit: the most bytes of K/V per token that it allows.
        source_bytes: those of the source.
        candidates: what was compared, the uniform number first.
        costs: by module: the divergence with this layer alone merged, by its number of K/V heads.
        text: a description of the text.
        held_out_tokens: on which candidates were compared.
        source_groups: the source's K/V heads, in the order of the layers.
        warning: about the text, or None.
        by_short_fits: whether layers were merged by short fits rather than by the closed form.
    """

    stated: str
    limit: int
    source_bytes: int
    candidates: tuple[Candidate, ...]
    costs: Mapping[str, Mapping[int, float]]
    text: str
    held_out_tokens: int
    source_groups: tuple[int, ...] = (1,)
    warning: str | None = None
    by_short_fits: bool = False

    @property
    def margin(self) -> float:
        """The share of the uniform number's divergence below which another candidate is chosen."""
        return FIT_MARGIN if self.by_short_fits else 1.0

    @property
    def chosen(self) -> Candidate:
        """The candidate that diverges least; the uniform number unless another diverges less by the margin."""
        uniform = next((each for each in self.candidates if each.rule is Rule.UNIFORM), None)
        best = min(self.candidates, key=lambda candidate: candidate.kl)
        return best if uniform is None or best.kl < self.margin * uniform.kl else uniform

    @property
    def notable(self) -> list[Candidate]:
        """The candidates of the first rules, and of the exchanges the best one."""
        tried = [each for each in self.candidates if each.rule is Rule.EXCHANGES]
        best = min(tried, key=lambda candidate: candidate.kl, default=None)
        return [each for each in self.candidates if each not in tried or each is best]

    @property
    def groups(self) -> int | list[int]:
        """What `convert_checkpoint` takes: one number if all layers have the same, else one for each layer."""
        chosen = self.chosen.groups
        return chosen[0] if len(set(chosen)) == 1 else list(chosen)

    def as_json(self) -> JsonObject:
        """The choice as plain data; a divergence that is not finite is null."""
        return {
            "stated": self.stated,
            "limit_kv_bytes_per_token": self.limit,
            "source_kv_bytes_per_token": self.source_bytes,
            "kv_bytes_per_token": self.chosen.kv_bytes_per_token,
            "groups": self.groups,
            "chosen": str(self.chosen.rule),
            "margin": self.margin,
            "merged_by": "short fits" if self.by_short_fits else "closed form",
            "candidates": [
                {
                    "rule": str(each.rule),
                    "groups": list(each.groups),
                    "kv_bytes_per_token": each.kv_bytes_per_token,
                    "kl": _finite(each.kl),
                }
                for each in self.candidates
            ],
            "layers": [
                {"module": module, "kl": {str(groups): _finite(kl) for groups, kl in costs.items()}}
                for module, costs in self.costs.items()
            ],
            "text": self.text,
            "held_out_tokens": self.held_out_tokens,
        }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
