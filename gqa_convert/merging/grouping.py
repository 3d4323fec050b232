"""Which K/V heads share one: those whose joint factorisation loses least.

A permutation of whole heads (rows of queries, keys and values with the columns of the output projection) leaves a
model's function as it is, so that any heads may become neighbours. A partition is scored by the sum over pairs of heads
in a group of what a merge of that pair alone would lose; raw likeness of weights says nothing. Shape legend as in
`factorisation`, with h heads in the layer.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.merging.factorisation import root

Array = npt.NDArray[Any]

_KEPT = 32
"""Leading directions of a head that are compared; the rest of a wide head would cost time and change little."""
_LEAST = 1e-9
"""Of the sum of all losses: a gain below that is rounding."""


def pair_losses(rows: Array, weights: Array, covariance: Array | None = None) -> tuple[Array, float]:
    """What the joint factorisation of each pair of heads loses.

    Args:
        rows: [h, c, d], keys that do not turn (or slowly), or values.
        weights: [h, c, c], symmetric: how strongly each direction of a head is read.
        covariance: of the inputs.

    Returns:
        Losses [h, h], symmetric, zero on the diagonal, and the power of all heads, both in the units of rows, weights
        and covariance.
    """
    heads, width, _ = rows.shape
    kept = min(width, _KEPT)
    weighed = np.stack([root(weight) for weight in weights]) @ rows
    seen = weighed if covariance is None else weighed @ covariance
    own = seen @ np.swapaxes(weighed, -1, -2)
    leading = np.swapaxes(np.linalg.eigh(own)[1][:, :, -kept:], -1, -2)  # [h, kept, c]
    reduced, seen = ((leading @ array).reshape(heads * kept, -1) for array in (weighed, seen))
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
    """What merging each pair of rotary key heads loses, frequency by frequency.

    Args:
        keys: [h, f, d], complex.
        powers: [h, f], of the queries that read each channel.
        covariance: of the inputs, not centred.

    Returns:
        Losses [h, h], symmetric, zero on the diagonal, and the power of all heads, in the units of keys, powers and
        covariance.
    """
    seen = (
        keys if covariance is None else keys.real @ covariance + 1j * (keys.imag @ covariance)
    )  # a product of complex ones costs twice that
    strength = np.sqrt(powers)
    gram = (
        np.matmul(seen.transpose(1, 0, 2), keys.conj().transpose(1, 2, 0)).transpose(1, 2, 0)
        * strength[:, None]
        * strength[None]
    )
    own = np.einsum("mmf->mf", gram).real
    total, apart = own[:, None] + own[None], own[:, None] - own[None]
    losses = np.asarray(
        ((total - np.sqrt(apart**2 + 4 * np.abs(gram) ** 2)) / 2).sum(-1).clip(0)
    )  # the lesser eigenvalue of two
    np.fill_diagonal(losses, 0)
    return losses, float(own.sum())


def group_heads(losses: Array, groups: int) -> Array:
    """Cut heads into groups of one size with little loss within them: greedy growth, then swaps of two heads until none
    helps.

    The neighbours as they stand are a start too, so that the result is never worse than they are.

    Args:
        losses: [h, h], symmetric: of keeping two heads in one group.
        groups: their number, a divisor of h.

    Returns:
        The heads in their new order, [h]: group after group, rising within a group.
    """
    heads = len(losses)
    losses = losses - np.diag(np.diagonal(losses))  # a head with itself loses nothing
    members = np.arange(heads) // (heads // groups)
    found = [_swapped(losses, start, groups) for start in (members, _grown(losses, groups))]
    best = min(found, key=lambda labels: _within(losses, labels))
    if _within(losses, best) > _within(losses, members) - _LEAST * float(losses.sum()):
        return np.arange(heads)
    firsts = np.array([np.flatnonzero(best == label)[0] for label in range(groups)])
    return np.lexsort((np.arange(heads), firsts[best]))


def _grown(losses: Array, groups: int) -> Array:
    """Each group starts with the head that fits worst to those left, and takes the one that fits best until it is
    full.
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


def _within(losses: Array, labels: Array) -> float:
    return float(losses[labels[:, None] == labels[None]].sum())
