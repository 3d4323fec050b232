"""Which K/V heads form a group: those whose joint factorisation loses least.

A permutation of whole heads (rows of queries, keys and values with the columns of the output projection) does not
change a model's function, so that any heads may become neighbours. The score of a partition is a sum over the pairs of
heads in each group: the loss of merging that pair alone. Similarity of the weights themselves does not predict it. The
shape legend is that of `factorisation`, with h heads in the layer.
"""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.merging.absorption_limits import AbsorptionLimits
from gqa_convert.merging.attention_heads import Heads
from gqa_convert.merging.factorisation import adjoint, root, times
from gqa_convert.merging.merge_layer import Moments, centred

Array = npt.NDArray[Any]

_KEPT = 32
"""Number of leading directions of a head that are compared; further ones would cost time and change little."""
_LEAST = 1e-9
"""The least gain that counts, as a share of the sum of all losses: a smaller one is rounding."""


def find_head_order(heads: Heads, groups: int, limits: AbsorptionLimits, moments: Moments | None) -> Array:
    """An order of whole K/V heads, with the query heads that read them, in which neighbours merge with little loss.

    Args:
        heads: of the source.
        groups: K/V heads of the result, a divisor of the source's.
        limits: heads keep their order if one of them holds, because what can't be absorbed is averaged.
        moments: of the inputs; without them every direction counts alike.

    Returns:
        Numbers of the source's K/V heads, [h]: group after group, in the source's order where another one gains
        nothing.
    """
    is_limited = limits.order_constraint or limits.key_constraint or limits.value_constraint
    if is_limited or groups == 1 or groups >= heads.groups:
        return np.arange(heads.groups)
    return group_heads(_key_losses(heads, limits, moments) + _value_losses(heads, moments), groups)


def reorder_heads(heads: Heads, order: Array) -> Heads:
    """The same function with its K/V heads, and the query heads that read them, in another order.

    Args:
        heads: of a layer without an order constraint.
        order: [h], numbers of its K/V heads.
    """
    return replace(
        heads,
        queries=heads.queries[order],
        keys=heads.keys[order],
        values=heads.values[order],
        outputs=heads.outputs[order],
    )


def _value_losses(heads: Heads, moments: Moments | None) -> Array:
    """Losses [h, h] relative to the power of all values, with the weights of the merge."""
    if moments is None:
        weights = np.tile(np.eye(heads.values.shape[1]), (heads.groups, 1, 1))
        losses, power = pair_losses(heads.values, weights)
    else:
        weights = np.einsum("mrDc,mrDe->mce", heads.outputs, heads.outputs, optimize=True)
        losses, power = pair_losses(heads.values, weights, moments.keys)
    return losses / (power or 1.0)


def _key_losses(heads: Heads, limits: AbsorptionLimits, moments: Moments | None) -> Array:
    """Losses [h, h] relative to the power of all scores."""
    query_moment, key_moment = (moments.queries, moments.keys) if moments else (None, None)
    covariance = centred(key_moment)
    plain_keys, rotary_keys = limits.divide_rows(heads.keys)
    plain_queries, rotary_queries = limits.divide_rows(heads.queries)
    weights = np.einsum("mrcd,mred->mce", times(plain_queries, query_moment), plain_queries, optimize=True)
    plain_losses, plain_power = pair_losses(plain_keys, weights, covariance)
    powers = np.einsum("mrfd,mrfd->fm", times(rotary_queries, query_moment), rotary_queries.conj()).real
    rotary_keys = rotary_keys.swapaxes(0, 1)[:, :, None]  # each frequency by itself
    rotary_losses, rotary_power = pair_losses(rotary_keys, powers[:, :, None, None], key_moment)
    # the mean over all distances is half the greatest square
    return (plain_losses + rotary_losses / 2) / (plain_power + rotary_power / 2 or 1.0)


def pair_losses(rows: Array, weights: Array, covariance: Array | None = None) -> tuple[Array, float]:
    """The loss of the joint factorisation of each pair of heads.

    Args:
        rows: [..., h, c, d], values or keys; what is in front of h is factored by itself, and losses add up.
        weights: [..., h, c, c], symmetric: how strongly each direction of a head is read.
        covariance: of the inputs.

    Returns:
        Losses [h, h], symmetric, zero on the diagonal, and the power of all heads, both in the units of rows, weights
        and covariance.
    """
    *others, heads, head_dim, inputs = rows.shape
    kept = min(head_dim, _KEPT)
    weighted = root(weights) @ rows
    seen = times(weighted, covariance)
    own = seen @ adjoint(weighted)
    leading = adjoint(np.linalg.eigh(own)[1][..., -kept:])
    seen = (leading @ seen).reshape(*others, heads * kept, inputs)
    weighted = (leading @ weighted).reshape(*others, heads * kept, inputs)
    gram = (seen @ adjoint(weighted)).reshape(*others, heads, kept, heads, kept)
    losses = np.zeros((heads, heads))
    for one, other in itertools.combinations(range(heads), 2):
        pair = gram[..., [one, other], :, :, :][..., [one, other], :]
        joint = pair.reshape(*others, 2 * kept, 2 * kept)
        losses[one, other] = losses[other, one] = np.linalg.eigvalsh(joint)[..., :kept].sum().clip(0)
    return losses, float(np.trace(own, axis1=-2, axis2=-1).real.sum())


def group_heads(losses: Array, groups: int) -> Array:
    """Divide heads into groups of equal size with little loss within them: greedy growth, then swaps of two heads
    until none helps.

    The source's own neighbours are a second starting point, so that the result is never worse than they are.

    Args:
        losses: [h, h], symmetric: the loss of having two heads in one group.
        groups: number of groups, a divisor of h.

    Returns:
        The heads in their new order, [h]: group after group, in ascending order within a group.
    """
    heads = len(losses)
    losses = (losses + losses.T) / 2  # otherwise swaps that seem to gain could go round in circles
    np.fill_diagonal(losses, 0)
    neighbours = np.repeat(np.arange(groups), heads // groups)
    best = neighbours
    for start in (neighbours, _grow_groups(losses, groups)):
        found = _swap_heads(losses, start, groups)
        if _loss_within(losses, found) < _loss_within(losses, best):
            best = found
    if _loss_within(losses, best) > _loss_within(losses, neighbours) - _LEAST * losses.sum():
        return np.arange(heads)
    firsts = np.array([np.argmax(best == label) for label in range(groups)])
    return np.argsort(firsts[best], kind="stable")


def _grow_groups(losses: Array, groups: int) -> Array:
    """Labels [h] of groups that grow one after another: each starts with the remaining head that fits the others worst,
    and takes the head that fits best until it is full.
    """
    labels = np.full(len(losses), -1)
    for label in range(groups):
        left = np.flatnonzero(labels < 0)
        worst = losses[np.ix_(left, left)].sum(1).argmax()
        labels[left[worst]] = label
        while np.sum(labels == label) < len(losses) // groups:
            left = np.flatnonzero(labels < 0)
            best = losses[left][:, labels == label].sum(1).argmin()
            labels[left[best]] = label
    return labels


def _swap_heads(losses: Array, labels: Array, groups: int) -> Array:
    """Labels [h] after the swap of two heads that gains most, again and again until none gains."""
    labels = labels.copy()
    while True:
        to_group = losses @ np.eye(groups)[labels]  # [h, groups]
        own = to_group[np.arange(len(labels)), labels]
        crossed = to_group[:, labels]
        change = crossed + crossed.T - own[:, None] - own[None] - 2 * losses
        change[labels[:, None] == labels] = 0
        one, other = np.unravel_index(np.argmin(change), change.shape)
        if change[one, other] >= -_LEAST * losses.sum():
            return labels
        labels[[one, other]] = labels[[other, one]]


def _loss_within(losses: Array, labels: Array) -> float:
    return float(losses[labels[:, None] == labels].sum())
