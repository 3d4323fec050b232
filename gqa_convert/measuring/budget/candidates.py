"""The lists of K/V heads by layer that are compared under one budget."""

from collections.abc import Callable, Sequence
from typing import Final

from gqa_convert.measuring.budget.allocation import (
    LayerCosts,
    exchanges,
    largest_uniform,
    least_sum,
    least_sum_of_roots,
)
from gqa_convert.measuring.budget.choice import Rule

EXCHANGE_ROUNDS: Final = 4
"""How often, at most, exchanges of heads between layers of the best list are tried."""
_EXCHANGES: Final = 12
"""How many of them each time: those with the least sum of costs."""
_RULES: Final = {Rule.UNIFORM: largest_uniform, Rule.SUM: least_sum, Rule.ROOTS: least_sum_of_roots}


class CandidateSearch:
    """The candidates under one budget.

    Args:
        layers: the costs of each layer.
        limit: bytes per token that all layers may take together.

    Attributes:
        found: by the candidate's numbers of K/V heads: the first rule that yields it, and its divergence.
    """

    def __init__(self, layers: Sequence[LayerCosts], limit: int) -> None:
        self.found: dict[tuple[int, ...], tuple[Rule, float]] = {}
        self._layers, self._limit = layers, limit
        self._rules: dict[tuple[int, ...], Rule] = {}
        self._exchanged: set[tuple[int, ...]] = set()

    def first(self) -> list[tuple[int, ...]]:
        """The uniform numbers, and those that cost least."""
        for rule, choose in _RULES.items():
            self._rules.setdefault(choose(self._layers, self._limit), rule)
        return list(self._rules)

    def next(self) -> list[tuple[int, ...]]:
        """Exchanges between the layers of the best numbers; none if they were tried already."""
        best = min(self.found, key=lambda counts: self.found[counts][1])
        if best in self._exchanged:
            return []
        self._exchanged.add(best)
        new = [each for each in exchanges(self._layers, best, self._limit) if each not in self.found][:_EXCHANGES]
        self._rules |= dict.fromkeys(new, Rule.EXCHANGES)
        return new

    def add(self, counts: tuple[int, ...], kl: float) -> None:
        """Add the measured divergence of a candidate in nats per token."""
        self.found[counts] = self._rules[counts], kl


def measure_candidates(
    search: CandidateSearch, measure: Callable[[Sequence[tuple[int, ...]]], list[float]], *, rounds: int
) -> None:
    """Measure the candidates of a budget.

    Args:
        search: for the candidates.
        measure: the divergences of lists.
        rounds: how often, at most, exchanges are tried.
    """
    asked = search.first()
    for left in range(rounds, -1, -1):
        if not asked:
            return
        for counts, kl in zip(asked, measure(asked), strict=True):
            search.add(counts, kl)
        asked = search.next() if left else []
