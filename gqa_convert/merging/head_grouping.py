"""Which K/V heads form a group: those whose joint factorisation loses least.

A permutation of whole heads (rows of queries, keys and values with the columns of the output projection) does not
change a model's function, so that any heads may become neighbours. The score of a partition is a sum over the pairs of
heads in each group: the loss of merging that pair alone. Similarity of the weights themselves does not predict it. The
shape legend is that of `factorisation`, with h heads in the layer.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.merging.absorption_limits import AbsorptionLimits
from gqa_convert.merging.attention_heads import Heads
from gqa_convert.merging.factorisation import root, times
from gqa_convert.merging.merge_layer import Moments, centred, complex_rows

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
    queries, moment, covariance = heads.queries, None, None
    if moments is not None:
        queries, moment, covariance = queries @ moments.queries, moments.keys, centred(moments.keys)
    losses, power = np.zeros((heads.groups, heads.groups)), 0.0
    if limits.pairs.size:
        real, imaginary = limits.pairs
        powers = np.einsum("mrcd,mrcd->mc", queries, heads.queries)
        powers = powers[:, real] + powers[:, imaginary]
        rotary_losses, rotary_power = rotary_pair_losses(complex_rows(heads.keys, limits.pairs), powers, moment)
        losses, power = rotary_losses / 2, rotary_power / 2  # the mean over all distances is half the greatest square
    plain = limits.plain_rows(heads.keys.shape[1])
    if plain.size:
        weights = np.einsum("mrcd,mred->mce", queries[:, :, plain], heads.queries[:, :, plain], optimize=True)
        plain_losses, plain_power = pair_losses(heads.keys[:, plain], weights, covariance)
        losses, power = losses + plain_losses, power + plain_power
    return losses / (power or 1.0)


def pair_losses(rows: Array, weights: Array, covariance: Array | None = None) -> tuple[Array, float]:
    """The loss of the joint factorisation of each pair of heads.

    Args:
        rows: [h, c, d], values, or keys without rotary positions.
        weights: [h, c, c], symmetric: how strongly each direction of a head is read.
        covariance: of the inputs.

    Returns:
        Losses [h, h], symmetric, zero on the diagonal, and the power of all heads, both in the units of rows, weights
        and covariance.
    """
    heads, head_dim, _ = rows.shape
    kept = min(head_dim, _KEPT)
    weighted = np.stack([root(weight) for weight in weights]) @ rows
    seen = times(weighted, covariance)
    own = seen @ weighted.swapaxes(1, 2)
    leading = np.linalg.eigh(own)[1][:, :, -kept:].swapaxes(1, 2)  # [h, kept, c]
    left = (leading @ seen).reshape(heads * kept, -1)
    right = (leading @ weighted).reshape(heads * kept, -1)
    gram = (left @ right.T).reshape(heads, kept, heads, kept).transpose(0, 2, 1, 3)
    losses = np.zeros((heads, heads))
    for head in range(heads - 1):
        others = np.arange(head + 1, heads)
        joint = np.empty((len(others), 2 * kept, 2 * kept))
        joint[:, :kept, :kept] = gram[head, head]
        joint[:, kept:, kept:] = gram[others, others]
        joint[:, :kept, kept:] = gram[head, others]
        joint[:, kept:, :kept] = gram[others, head]
        dropped = np.linalg.eigvalsh(joint)[:, :kept].sum(1).clip(0)
        losses[head, others] = losses[others, head] = dropped
    return losses, float(np.trace(own, axis1=1, axis2=2).sum())


def rotary_pair_losses(keys: Array, powers: Array, covariance: Array | None = None) -> tuple[Array, float]:
    """The loss of merging each pair of rotary key heads, frequency by frequency.

    Args:
        keys: [h, f, d], complex.
        powers: [h, f], of the queries that read each channel.
        covariance: of the inputs, not centred.

    Returns:
        Losses [h, h], symmetric, zero on the diagonal, and the power of all heads, in the units of keys, powers and
        covariance.
    """
    strength = np.sqrt(powers)
    gram = times(keys, covariance).transpose(1, 0, 2) @ keys.conj().transpose(1, 2, 0)  # [f, h, h]
    gram = gram.transpose(1, 2, 0) * strength[:, None] * strength[None]
    own = np.einsum("mmf->mf", gram).real
    total, apart = own[:, None] + own[None], own[:, None] - own[None]
    lesser = (total - np.sqrt(apart**2 + 4 * np.abs(gram) ** 2)) / 2  # the lesser eigenvalue of each 2 x 2 matrix
    losses = np.asarray(lesser.sum(-1).clip(0))
    np.fill_diagonal(losses, 0)
    return (losses + losses.T) / 2, float(own.sum())  # the products of a pair are rounded either way


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
