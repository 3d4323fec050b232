"""A budget of K/V cache, and the numbers of K/V heads by layer that cost least within it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from gqa_convert.conversion.plan import merging_counts
from gqa_convert.errors import OptionError


@dataclass(frozen=True, slots=True)
class KVBudget:
    """What the K/V cache of a result may take per token, over all layers.

    Attributes:
        stated: the budget as the user wrote it.
        share: of the source's bytes per token; None if bytes are stated.
        nbytes: bytes per token; None if a share is stated.
    """

    stated: str
    share: Fraction | None = None
    nbytes: int | None = None

    def limit(self, source: int, least: int) -> int:
        """The most bytes per token that the budget allows.

        Args:
            source: the source's bytes per token.
            least: those of one K/V head in every layer.

        Raises:
            OptionError: the budget is not below the source's bytes, or does not suffice for one head in every layer.
        """
        limit = self.nbytes
        if self.share is not None:
            limit = int(source * self.share)
        assert limit is not None
        if not least <= limit < source:
            raise OptionError(
                f"--kv-budget {self.stated} is {limit:,} bytes per token: state less than the {source:,} of the source, and at "
                f"least {least:,}, which one K/V head in every layer takes"
            )
        return limit


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """What merging one layer alone costs.

    Attributes:
        module: its name in the checkpoint.
        kv_heads: of the source.
        head_bytes: bytes of K/V cache per token of one K/V head.
        kl: the KL divergence from the source in nats per token, by each smaller number of K/V heads; None where it is not
            finite.
    """

    module: str
    kv_heads: int
    head_bytes: int
    kl: Mapping[int, float | None]


def least_sum(layers: Sequence[LayerCosts], limit: int) -> tuple[int, ...]:
    """The number of K/V heads of each layer that together cost least, by dynamic programming over the bytes taken.

    Args:
        layers: the costs of each layer.
        limit: bytes per token that all layers may take together, enough for the smallest numbers.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for layer in layers:
        extended: dict[int, tuple[float, tuple[int, ...]]] = {}
        for taken, (cost, chosen) in best.items():
            for heads, kl in {**layer.kl, layer.kv_heads: 0.0}.items():
                total = taken + heads * layer.head_bytes
                together = math.inf if kl is None else cost + kl
                if total <= limit and (total not in extended or together < extended[total][0]):
                    extended[total] = (together, (*chosen, heads))
        best = extended
    _, _, cheapest = min((cost, total, chosen) for total, (cost, chosen) in best.items())
    return cheapest


def largest_uniform(layers: Sequence[LayerCosts], limit: int) -> tuple[int, ...]:
    """The largest number of K/V heads that is possible in all layers within the limit, once for each layer."""
    together = sum(layer.head_bytes for layer in layers)
    common = merging_counts(*(layer.kv_heads for layer in layers))
    largest = max(heads for heads in common if heads * together <= limit)
    return (largest,) * len(layers)
