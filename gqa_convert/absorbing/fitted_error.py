"""What a merged layer's keys and values lose of the source's, as functions: no maps between heads and no signs matter.

Shape legend as in `heads`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.absorbing.barriers import Freedom
from gqa_convert.absorbing.heads import Heads
from gqa_convert.absorbing.merge import Moments, centred

Array = npt.NDArray[Any]
Product = Callable[[Array, Array], Array]
"""[n, e], [n, e] -> [n, n]: inner products of rows under a moment."""


def fitted_errors(source: Heads, merged: Heads, freedom: Freedom, moments: Moments | None) -> tuple[float, float]:
    """The relative error of the scores and of what the values bring to the output.

    Scores are compared over all distances: under rotary positions, frequency by frequency. Without moments every input direction
    counts alike.

    Args:
        source: [K] K/V heads.
        merged: fewer.
        freedom: which rows turn.
        moments: of the inputs.

    Returns:
        |source - merged| / |source| of keys, and of values, in root mean square.
    """
    whole = merged.repeated(source.groups)
    turning: Product = _under(moments.keys if moments else None)
    asking: Product = _under(moments.queries if moments else None)
    still: Product = _under(centred(moments.keys) if moments else None)
    lost, total = np.zeros(2), np.zeros(2)
    real, imaginary = freedom.pairs
    rest = np.setdiff1d(np.arange(source.keys.shape[1]), np.concatenate([real, imaginary]))
    for head in range(source.groups):
        old, new = source.keys[head], whole.keys[head]
        for query, new_query in zip(source.queries[head], whole.queries[head], strict=True):
            parts = [_still(query[rest], old[rest], new_query[rest], new[rest], asking, still)]
            if len(real):
                paired = [array[real] + 1j * array[imaginary] for array in (query, old, new_query, new)]
                parts.append(_turning(paired[0], paired[1], paired[2], paired[3], asking, turning))
            for difference, norm in parts:
                lost[0] += difference
                total[0] += norm
        values = source.values[head], whole.values[head]
        seen = {(a, b): turning(values[a], values[b]) for a in (0, 1) for b in (0, 1)}
        for columns in zip(source.outputs[head], whole.outputs[head], strict=True):
            inner = {(a, b): float(np.sum((columns[a].T @ columns[b]) * seen[a, b])) for a in (0, 1) for b in (0, 1)}
            lost[1] += inner[0, 0] + inner[1, 1] - 2 * inner[0, 1]
            total[1] += inner[0, 0]
    keys, values_ = np.sqrt(np.maximum(lost, 0) / np.where(total > 0, total, 1.0))
    return float(keys), float(values_)


def _under(moment: Array | None) -> Product:
    if moment is None:
        return lambda a, b: np.asarray(a @ b.conj().T)
    return lambda a, b: np.asarray(a @ moment @ b.conj().T)


def _still(query: Array, key: Array, new_query: Array, new_key: Array, asking: Product, seen: Product) -> tuple[float, float]:
    """|Q^T K - Q'^T K'|^2 and |Q^T K|^2 of rows that do not turn."""
    old = float(np.sum(asking(query, query) * seen(key, key)))
    new = float(np.sum(asking(new_query, new_query) * seen(new_key, new_key)))
    return old + new - 2 * float(np.sum(asking(query, new_query) * seen(key, new_key))), old


def _turning(query: Array, key: Array, new_query: Array, new_key: Array, asking: Product, seen: Product) -> tuple[float, float]:
    """The same summed over frequencies: over all distances, those of different frequency are orthogonal."""

    def inner(a: Array, b: Array, c: Array, d: Array) -> float:
        return float(np.sum(np.diagonal(asking(a, b)) * np.diagonal(seen(c, d)).conj()).real)

    old = inner(query, query, key, key)
    return old + inner(new_query, new_query, new_key, new_key) - 2 * inner(query, new_query, key, new_key), old
