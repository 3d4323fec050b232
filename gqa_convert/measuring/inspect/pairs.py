"""The error of merging each pair of K/V heads of a layer alone.

Merging and its errors depend on a head's rows only through their inner products. So each pair is first expressed in as
many inputs as it has rows, with the same inner products. Its cost then does not depend on the model's hidden_size.

Shape legend as in `gqa_convert.merging.folding.heads`; n rows of a pair of heads, 2 c or 2 w.
"""

from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.merging.folding.constraints import FoldingConstraints
from gqa_convert.merging.folding.fitted_error import fitted_errors
from gqa_convert.merging.folding.heads import Heads
from gqa_convert.merging.folding.merge import Moments, merge_layer

Array = npt.NDArray[Any]


def pair_errors(
    heads: Heads, constraints: FoldingConstraints, moments: Moments | None
) -> dict[tuple[int, int], tuple[float, float]]:
    """The fitted errors of merging every pair alone by the closed form, relative to the output of the two heads.

    Args:
        heads: of the source.
        constraints: what may be folded into neighbouring projections.
        moments: of the inputs; without them every direction has the same weight.

    Returns:
        The errors of keys and of values, as from `fitted_errors`, by the indices of the two heads in ascending order.
    """
    query_moment, key_moment = (moments.queries, moments.keys) if moments else (None, None)
    queries = _rooted(_products(heads.queries, query_moment))  # [K, r, c, c]
    outputs = _rooted(np.einsum("krDw,krDv->krwv", heads.outputs, heads.outputs, optimize=True))
    inner = [_Inner(rows, key_moment) for rows in (heads.keys, heads.values)]
    found = {}
    for pair in combinations(range(heads.groups), 2):
        keys, values = (each.pair(pair) for each in inner)
        width = max(keys.shape[2], values.shape[2])
        both = list(pair)
        two = Heads(queries[both], _widened(keys, width), _widened(values, width), outputs[both], None)
        plain = Moments(np.eye(queries.shape[-1]), np.eye(width)) if moments else None
        found[pair] = fitted_errors(two, merge_layer(two, 1, constraints, plain), constraints, plain)
    return found


class _Inner:
    """Inner products of the rows of all heads.

    Args:
        rows: [K, c, e].
        moment: of the inputs; by default the identity.
    """

    def __init__(self, rows: Array, moment: Array | None) -> None:
        heads, width, inputs = rows.shape
        flat = rows.reshape(heads * width, inputs)
        seen = flat if moment is None else flat @ moment
        means = np.zeros(len(flat)) if moment is None else seen[:, -1] / np.sqrt(moment[-1, -1])
        about = seen @ flat.T - np.outer(means, means)
        self._about = about.reshape(heads, width, heads, width)
        self._means = means.reshape(heads, width)

    def pair(self, pair: tuple[int, int]) -> Array:
        """Two heads [2, c, n + 1] with the same inner products; the last input is the constant."""
        both = list(pair)
        about = self._about[both][:, :, both]
        size = about.shape[0] * about.shape[1]
        rows = _rooted(about.reshape(size, size))
        return np.concatenate([rows, self._means[both].reshape(size, 1)], axis=1).reshape(2, -1, size + 1)


def _products(rows: Array, moment: Array | None) -> Array:
    """[..., c, c] of rows [..., c, e]."""
    return np.asarray((rows if moment is None else rows @ moment) @ np.swapaxes(rows, -1, -2))


def _rooted(gram: Array) -> Array:
    """Rows [..., n, n] whose inner products are a positive symmetric matrix."""
    values, vectors = np.linalg.eigh(gram)
    return np.asarray((vectors * np.sqrt(np.maximum(values, 0))[..., None, :]) @ np.swapaxes(vectors, -1, -2))


def _widened(rows: Array, width: int) -> Array:
    """Zero inputs added in front, so that the constant stays last."""
    return np.pad(rows, ((0, 0), (0, 0), (width - rows.shape[2], 0)))
