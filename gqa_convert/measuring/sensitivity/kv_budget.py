"""A budget of K/V cache, the numbers of K/V heads by layer that cost least within it, and what is
chosen.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from gqa_convert.conversion.plan import merging_counts
from gqa_convert.errors import OptionError
from gqa_convert.runtime.json_objects import Result

Numbers = tuple[int, ...]
"""The number of K/V heads of each layer."""


class KVBudget(NamedTuple):
    """What the K/V cache of a result may take per token, over all layers.

    Attributes:
        stated: the budget as the user wrote it.
        share: of the source's bytes per token.
    """

    stated: str
    share: Fraction

    def limit(self, source: int, least: int) -> int:
        """The most bytes per token that the budget allows.

        Args:
            source: the source's bytes per token.
            least: those of one K/V head in every layer.

        Raises:
            OptionError: the budget is not below the source's bytes, or does not suffice for one
                head in every layer.
        """
        limit = int(source * self.share)
        if not least <= limit < source:
            raise OptionError(
                f"--kv-budget {self.stated} is {limit:,} bytes per token: state less than the "
                f"{source:,} of the source, and at least {least:,}, which one K/V head in every "
                "layer takes"
            )
        return limit


@dataclass(frozen=True)
class LayerCosts:
    """What merging one layer alone costs.

    Attributes:
        module: its name in the checkpoint.
        kv_heads: of the source.
        head_bytes: bytes of K/V cache per token of one K/V head.
        kl: the KL divergence from the source in nats per token, by each smaller number of K/V
            heads; None where it is not finite.
    """

    module: str
    kv_heads: int
    head_bytes: int
    kl: Mapping[int, float | None]


@dataclass(frozen=True)
class HeadAllocation:
    """A number of K/V heads for each layer that stays within the budget.

    Attributes:
        rule: how it was found.
        kv_heads: the numbers, in the order of the layers.
        kv_bytes_per_token: what they take over all layers.
        kl: the KL divergence from the source in nats per token on held-out text, with all layers
            merged; None where it is not finite.
    """

    rule: str
    kv_heads: Numbers
    kv_bytes_per_token: int
    kl: float | None


@dataclass(frozen=True)
class BudgetChoice(Result):
    """What `choose_num_kv_heads` found.

    Attributes:
        stated: the budget as the user wrote it.
        limit_kv_bytes_per_token: the most bytes that it allows.
        source_kv_bytes_per_token: those of the source.
        kv_bytes_per_token: those of the chosen numbers.
        kv_heads: the chosen numbers; one alone if all layers have the same.
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
    kv_heads: int | list[int]
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
        share = self.kv_bytes_per_token / self.source_kv_bytes_per_token
        compared = []
        for each in self.candidates:
            kl = "not finite" if each.kl is None else f"{each.kl:.4f}"
            compared.append(f"{each.rule} {kl}")
        return (
            f"--kv-heads {numbers_text(self.kv_heads)}, {self.kv_bytes_per_token:,} bytes "
            f"({share:.1%}); KL divergence from the source in nats per token on "
            f"{self.held_out_tokens:,} held-out tokens, all layers merged by {self.merged_by}: "
            + ", ".join(compared)
        )


def numbers_text(kv_heads: int | list[int]) -> str:
    """Numbers of K/V heads as `--kv-heads` takes them."""
    return str(kv_heads).strip("[]").replace(" ", "")


def least_sum(layers: Sequence[LayerCosts], limit: int) -> Numbers:
    """The number of K/V heads of each layer that together cost least, by dynamic programming over
    the bytes taken.

    Args:
        layers: the costs of each layer.
        limit: bytes per token that all layers may take together, enough for the smallest numbers.
    """
    # by the bytes taken: the least cost, with these bytes and the numbers that have it
    best: dict[int, tuple[float, int, Numbers]] = {0: (0.0, 0, ())}
    for layer in layers:
        before, best = best, {}
        for cost, taken, numbers in before.values():
            for heads, kl in {**layer.kl, layer.kv_heads: 0.0}.items():
                total = taken + heads * layer.head_bytes
                together = math.inf if kl is None else cost + kl
                if total <= limit and (total not in best or together < best[total][0]):
                    best[total] = together, total, (*numbers, heads)
    return min(best.values())[-1]


def largest_uniform(layers: Sequence[LayerCosts], limit: int) -> Numbers:
    """The largest number of K/V heads that is possible in all layers within the limit, once for
    each layer.
    """
    together = sum(layer.head_bytes for layer in layers)
    common = merging_counts(*(layer.kv_heads for layer in layers))
    largest = max(heads for heads in common if heads * together <= limit)
    return (largest,) * len(layers)
