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
from gqa_convert.merging.factorisation import root
from gqa_convert.merging.merge_layer import Moments, centred

Array = npt.NDArray[Any]

_KEPT = 32
"""Number of leading directions of a head that are compared; further ones would cost time and change little."""
_LEAST = 1e-9
"""The least gain that counts, as a share of the sum of all losses: a smaller one is rounding."""


def pair_losses(rows: Array, weights: Array, covariance: Array | None = None) -> tuple[Array, float]:
    """The loss of the joint factorisation of each pair of heads.

    Args:
        rows: [h, c, d], values, or keys without rotary positions or of low frequency.
        weights: [h, c, c], symmetric: how strongly each direction of a head is read.
        covariance: of the inputs.

    Returns:
        Losses [h, h], symmetric, zero on the diagonal, and the power of all heads, both in the units of rows, weights
        and covariance.
    """
    heads, head_dim, _ = rows.shape
    kept = min(head_dim, _KEPT)
    weighted = np.stack([root(weight) for weight in weights]) @ rows
    seen = weighted if covariance is None else weighted @ covariance
    own = seen @ np.swapaxes(weighted, -1, -2)
    leading = np.swapaxes(np.linalg.eigh(own)[1][:, :, -kept:], -1, -2)  # [h, kept, c]
    reduced, seen = ((leading @ array).reshape(heads * kept, -1) for array in (weighted, seen))
    gram = (seen @ reduced.T).reshape(heads, kept, heads, kept).transpose(0, 2, 1, 3)
    losses = np.zeros((heads, heads))
    for head in range(heads - 1):
        others = np.arange(head + 1, heads)
        joint = np.empty((len(others), 2 * kept, 2 * kept))
        joint[:, :kept, :kept] = gram[head, head]
        joint[:, kept:, kept:] = gram[others, others]
        joint[:, :kept, kept:] = gram[head, others]
        joint[:, kept:, :kept] = gram[others, head]
        losses[head, others] = losses[others, head] = np.linalg.eigvalsh(joint)[:, :kept].sum(1).clip(0)
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
    # two real products take half the time of a complex one
    seen = keys if covariance is None else keys.real @ covariance + 1j * (keys.imag @ covariance)
    strength = np.sqrt(powers)
    gram = (
        np.matmul(seen.transpose(1, 0, 2), keys.conj().transpose(1, 2, 0)).transpose(1, 2, 0)
        * strength[:, None]
        * strength[None]
    )
    own = np.einsum("mmf->mf", gram).real
    total, apart = own[:, None] + own[None], own[:, None] - own[None]
    # the lesser eigenvalue of each 2 x 2 matrix
    losses = np.asarray(((total - np.sqrt(apart**2 + 4 * np.abs(gram) ** 2)) / 2).sum(-1).clip(0))
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
    losses -= np.diag(np.diagonal(losses))  # a head merged with itself loses nothing
    members = np.arange(heads) // (heads // groups)
    found = [_swapped(losses, start, groups) for start in (members, _grown(losses, groups))]
    best = min(found, key=lambda labels: _within(losses, labels))
    if _within(losses, best) > _within(losses, members) - _LEAST * float(losses.sum()):
        return np.arange(heads)
    firsts = np.array([np.flatnonzero(best == label)[0] for label in range(groups)])
    return np.lexsort((np.arange(heads), firsts[best]))


def _grown(losses: Array, groups: int) -> Array:
    """Grow one group after another: each starts with the remaining head that fits the others worst, and takes the head
    that fits best until it is full.
    """
    heads = len(losses)
    labels = np.full(heads, -1)
    for label in range(groups):
        left = np.flatnonzero(labels < 0)
        labels[left[np.argmax(losses[np.ix_(left, left)].sum(1))]] = label
        for _ in range(heads // groups - 1):
            left = np.flatnonzero(labels < 0)
            labels[left[np.argmin(losses[np.ix_(left, np.flatnonzero(labels == label))].sum(1))]] = label
    return labels


def _swapped(losses: Array, labels: Array, groups: int) -> Array:
    labels = labels.copy()
    least = _LEAST * float(losses.sum())
    within = _within(losses, labels)
    while True:
        to_group = losses @ np.eye(groups)[labels]  # [h, groups]
        own = to_group[np.arange(len(labels)), labels]
        crossed = to_group[:, labels]
        change = crossed + crossed.T - own[:, None] - own[None] - 2 * losses
        change[labels[:, None] == labels[None]] = 0
        one, other = np.unravel_index(np.argmin(change), change.shape)
        if change[one, other] >= -least:
            return labels
        labels[[one, other]] = labels[[other, one]]
        before, within = within, _within(losses, labels)
        if not within < before:  # a gain of rounding alone, after which the same swaps could come again
            labels[[one, other]] = labels[[other, one]]
            return labels


def _within(losses: Array, labels: Array) -> float:
    return float(losses[labels[:, None] == labels[None]].sum())


def find_head_order(heads: Heads, groups: int, constraints: AbsorptionLimits, moments: Moments | None) -> Array:
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


def reorder_heads(heads: Heads, order: Array) -> Heads:
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


def _key_losses(heads: Heads, constraints: AbsorptionLimits, moments: Moments | None) -> Array:
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
