"""In which order a layer's K/V heads are merged, so that those that merge cheaply are neighbours.

Shape legend as in `heads`.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.merging.folding.constraints import FoldingConstraints
from gqa_convert.merging.folding.heads import Heads
from gqa_convert.merging.folding.merge import Moments, centred
from gqa_convert.merging.grouping import group_heads, pair_losses, rotary_pair_losses

Array = npt.NDArray[Any]


def order_heads(heads: Heads, groups: int, constraints: FoldingConstraints, moments: Moments | None) -> Array:
    """An order of whole K/V heads, with the query heads that read them, in which neighbours lose little by sharing one.

    Args:
        heads: of the source.
        groups: K/V heads of the result, a divisor of the source's.
        freedom: whether heads may change places; where something is averaged instead of absorbed they stay too.
        moments: of the inputs; without them every direction counts alike.

    Returns:
        Numbers of the source's K/V heads, [K]: group after group, as they were where nothing is gained.
    """
    identity = np.arange(heads.groups)
    if (
        any((constraints.order_constraint, constraints.key_constraint, constraints.value_constraint))
        or groups == 1
        or groups >= heads.groups
    ):
        return identity
    return group_heads(_key_losses(heads, constraints, moments) + _value_losses(heads, moments), groups)


def noted(order: Array) -> dict[str, list[int]]:
    """An order as it is kept in records: not at all, where every head stays in its place."""
    return {} if (order == np.arange(len(order))).all() else {"order": order.tolist()}


def ordered(heads: Heads, order: Array) -> Heads:
    """The same function with its K/V heads, and the query heads that read them, in another order.

    Args:
        heads: of a layer without an order barrier.
        order: [K], numbers of its K/V heads.
    """
    return replace(heads, **{role: getattr(heads, role)[order] for role in ("queries", "keys", "values", "outputs")})


def _value_losses(heads: Heads, moments: Moments | None) -> Array:
    """Relative to the power of all values, weighed as their merge weighs them."""
    if moments:
        weights = np.einsum("mrDc,mrDe->mce", heads.outputs, heads.outputs, optimize=True)
    else:
        weights = np.tile(np.eye(heads.values.shape[1]), (heads.groups, 1, 1))
    losses, power = pair_losses(heads.values, weights, moments.keys if moments else None)
    return losses / (power or 1.0)


def _key_losses(heads: Heads, constraints: FoldingConstraints, moments: Moments | None) -> Array:
    """Relative to the power of all scores."""
    asked = heads.queries @ moments.queries if moments else heads.queries
    real, imaginary = constraints.pairs
    rest = np.setdiff1d(np.arange(heads.keys.shape[1]), np.concatenate(constraints.pairs))
    losses, power = np.zeros((heads.groups, heads.groups)), 0.0
    if len(real):
        powers = np.einsum("mrcd,mrcd->mc", asked, heads.queries)
        turning = heads.keys[:, real] + 1j * heads.keys[:, imaginary]
        found = rotary_pair_losses(turning, powers[:, real] + powers[:, imaginary], moments.keys if moments else None)
        losses, power = found[0] / 2, found[1] / 2  # over all distances, each frequency has half its greatest square
    if len(rest):
        weights = np.einsum("mrcd,mred->mce", asked[:, :, rest], heads.queries[:, :, rest], optimize=True)
        found = pair_losses(heads.keys[:, rest], weights, centred(moments.keys) if moments else None)
        losses, power = losses + found[0], power + found[1]
    return losses / (power or 1.0)
