"""The order of a layer's K/V heads in which heads that merge with little loss are neighbours.

The shape legend is that of `heads`.
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
    """An order of whole K/V heads, with the query heads that read them, in which neighbours merge with little loss.

    Args:
        heads: of the source.
        groups: K/V heads of the result, a divisor of the source's.
        constraints: heads keep their order if one of them holds, because what can't be folded is averaged.
        moments: of the inputs; without them every direction counts alike.

    Returns:
        Numbers of the source's K/V heads, [K]: group after group, in the source's order where another one gains
        nothing.
    """
    identity = np.arange(heads.groups)
    if (
        any((constraints.order_constraint, constraints.key_constraint, constraints.value_constraint))
        or groups == 1
        or groups >= heads.groups
    ):
        return identity
    return group_heads(_key_losses(heads, constraints, moments) + _value_losses(heads, moments), groups)


def ordered(heads: Heads, order: Array) -> Heads:
    """The same function with its K/V heads, and the query heads that read them, in another order.

    Args:
        heads: of a layer without an order constraint.
        order: [K], numbers of its K/V heads.
    """
    return replace(heads, **{role: getattr(heads, role)[order] for role in ("queries", "keys", "values", "outputs")})


def _value_losses(heads: Heads, moments: Moments | None) -> Array:
    """Losses [K, K] relative to the power of all values, with the weights of the merge."""
    if moments:
        weights = np.einsum("mrDc,mrDe->mce", heads.outputs, heads.outputs, optimize=True)
    else:
        weights = np.tile(np.eye(heads.values.shape[1]), (heads.groups, 1, 1))
    losses, power = pair_losses(heads.values, weights, moments.keys if moments else None)
    return losses / (power or 1.0)


def _key_losses(heads: Heads, constraints: FoldingConstraints, moments: Moments | None) -> Array:
    """Losses [K, K] relative to the power of all scores."""
    read = heads.queries @ moments.queries if moments else heads.queries
    real, imaginary = constraints.pairs
    rest = np.setdiff1d(np.arange(heads.keys.shape[1]), np.concatenate(constraints.pairs))
    losses, power = np.zeros((heads.groups, heads.groups)), 0.0
    if len(real):
        powers = np.einsum("mrcd,mrcd->mc", read, heads.queries)
        rotary = heads.keys[:, real] + 1j * heads.keys[:, imaginary]
        found = rotary_pair_losses(rotary, powers[:, real] + powers[:, imaginary], moments.keys if moments else None)
        losses, power = found[0] / 2, found[1] / 2  # the mean over all distances is half the greatest square
    if len(rest):
        weights = np.einsum("mrcd,mred->mce", read[:, :, rest], heads.queries[:, :, rest], optimize=True)
        found = pair_losses(heads.keys[:, rest], weights, centred(moments.keys) if moments else None)
        losses, power = losses + found[0], power + found[1]
    return losses / (power or 1.0)
