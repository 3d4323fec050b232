"""The error of a merged layer's scores and values against the source's, which does not depend on maps between heads.

The shape legend is that of `heads`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.merging.absorption_limits import AbsorptionLimits
from gqa_convert.merging.attention_heads import Heads
from gqa_convert.merging.merge_layer import Moments

Array = npt.NDArray[Any]


def reconstruction_errors(
    source: Heads, merged: Heads, constraints: AbsorptionLimits, moments: Moments | None
) -> tuple[float, float]:
    """The relative errors of the scores and of the output that the values produce.

    Scores are compared over all distances: under rotary positions, frequency by frequency. Inputs of queries and of
    keys count as independent; without moments every direction counts alike. In rows without rotary positions, what all
    keys have in common is left out, because it has no effect after the softmax.

    Args:
        source: [K] K/V heads.
        merged: the result with fewer K/V heads, or the source itself.
        constraints: of the layer, which name the rotary pairs.
        moments: of the inputs.

    Returns:
        |source - merged| / |source| in root mean square: of the scores, and of the values' output.
    """
    if merged is source:
        return 0.0, 0.0
    query_moment, key_moment = (moments.queries, moments.keys) if moments else (None, None)
    size = source.groups // merged.groups
    scores, outputs = _Loss(), _Loss()
    without_positions = np.setdiff1d(np.arange(source.keys.shape[1]), np.concatenate(constraints.pairs))
    for group in range(merged.groups):
        new_key, new_value = _Rows(merged.keys[group], key_moment), _Rows(merged.values[group], key_moment)
        for head in range(group * size, (group + 1) * size):
            keys = _Rows(source.keys[head], key_moment), new_key
            for pair in zip(source.queries[head], merged.queries[head], strict=True):
                queries = _Rows(pair[0], query_moment), _Rows(pair[1], query_moment)
                _add_scores(scores, queries, keys, constraints, without_positions)
            values = _Rows(source.values[head], key_moment), new_value
            inner = [[values[a].inner(values[b]) for b in (0, 1)] for a in (0, 1)]
            for columns in zip(source.outputs[head], merged.outputs[head], strict=True):
                outputs.add(
                    *(float(np.vdot(columns[a].T @ columns[b], inner[a][b])) for a, b in ((0, 0), (1, 1), (0, 1)))
                )
    return scores.relative, outputs.relative


@dataclass
class _Loss:
    """Sums of |old - new|^2 and of |old|^2."""

    lost: float = 0.0
    total: float = 0.0

    def add(self, old: float, new: float, both: float) -> None:
        """Add two functions, given their squares and their product."""
        self.lost += old + new - 2 * both
        self.total += old

    @property
    def relative(self) -> float:
        return float(np.sqrt(max(self.lost, 0.0) / (self.total or 1.0)))


class _Rows:
    """Rows [n, e] and their inner products under a moment [e, e] of the inputs.

    Args:
        rows: of one head.
        moment: by default the identity.
    """

    def __init__(self, rows: Array, moment: Array | None) -> None:
        self._rows = rows
        self._seen = rows if moment is None else rows @ moment
        self._mean: Array | None = None if moment is None else self._seen[:, -1] / np.sqrt(moment[-1, -1])

    def inner(self, other: "_Rows", which: Array | slice = slice(None), *, centred: bool = False) -> Array:
        """[n, n] of the rows `which`; with `centred`, the inputs' mean is removed."""
        product = self._seen[which] @ other._rows[which].T
        if centred and self._mean is not None and other._mean is not None:
            product -= np.outer(self._mean[which], other._mean[which])
        return np.asarray(product)

    def paired(self, other: "_Rows", real: Array, imaginary: Array) -> Array:
        """[f], complex: the product of each rotary pair with the same pair of the other rows."""
        a, b, c, d = self._seen[real], self._seen[imaginary], other._rows[real], other._rows[imaginary]
        return np.asarray(_dots(a, c) + _dots(b, d) + 1j * (_dots(b, c) - _dots(a, d)))


def _dots(a: Array, b: Array) -> Array:
    return np.asarray(np.einsum("fe,fe->f", a, b))


def _add_scores(
    loss: _Loss,
    queries: tuple[_Rows, _Rows],
    keys: tuple[_Rows, _Rows],
    constraints: AbsorptionLimits,
    rest: Array,
) -> None:
    """Add the scores of one query head, of the source and of the merged layer; `rest` are the rows without rotary
    positions.
    """
    real, imaginary = constraints.pairs
    combinations = ((0, 0), (1, 1), (0, 1))
    if len(rest):
        loss.add(
            *(
                float(np.vdot(queries[a].inner(queries[b], rest), keys[a].inner(keys[b], rest, centred=True)))
                for a, b in combinations
            )
        )
    if len(real):  # over all distances, frequencies are orthogonal and the mean is half the greatest square
        products = [
            (queries[a].paired(queries[b], real, imaginary), keys[a].paired(keys[b], real, imaginary))
            for a, b in combinations
        ]
        loss.add(*(float(np.vdot(key, query).real) / 2 for query, key in products))
