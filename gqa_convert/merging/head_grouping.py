"""Which K/V heads form a group: those whose joint factorisation loses least.

A permutation of whole heads (rows of queries, keys and values with the columns of the output
projection) does not change a model's function, so that any heads may become neighbours. The score
of a partition is a sum over the pairs of heads in each group: the loss of merging that pair alone.
Similarity of the weights themselves does not predict it. The shape legend is that of
`factorisation`.
"""

from dataclasses import replace

import numpy as np
from array_api_compat import array_namespace

from .absorption_limits import AbsorptionLimits
from .attention_heads import Heads
from .factorisation import Array, Channels, adjoint, as_numpy, on_device, times, weigh
from .merge_layer import Moments, key_channels, value_channels

_KEPT = 32
"""Number of leading directions of a head that are compared: with all, a fit at Llama-2-7B's width
takes a fifth longer.
"""
_LEAST = 1e-9
"""The least gain that counts, as a share of the sum of all losses: a smaller one is rounding."""


def find_head_order(
    heads: Heads, kv_heads: int, limits: AbsorptionLimits, moments: Moments
) -> Array:
    """An order of whole K/V heads, with the query heads that read them, in which neighbours merge
    with little loss.

    Args:
        heads: of the source.
        kv_heads: K/V heads of the result, a divisor of the source's.
        limits: heads keep their order if one of them holds, because what can't be absorbed is
            averaged.
        moments: of the inputs.

    Returns:
        Numbers of the source's K/V heads, [h]: group after group, in the source's order where
        another one gains nothing.
    """
    is_limited = limits.order_constraint or limits.key_constraint or limits.value_constraint
    if is_limited or kv_heads == 1 or kv_heads >= heads.kv_heads:
        return np.arange(heads.kv_heads)
    still, turning = key_channels(heads, limits, moments)
    of_still, still_power = pair_losses(still)
    of_turning, turning_power = pair_losses(turning)
    of_values, value_power = pair_losses(value_channels(heads, moments))
    # the mean over all distances is half the greatest square
    of_keys = (of_still + of_turning / 2) / (still_power + turning_power / 2 or 1.0)
    return group_heads(of_keys + of_values / (value_power or 1.0), kv_heads)


def reorder_heads(heads: Heads, order: Array) -> Heads:
    """The same function with its K/V heads, and the query heads that read them, in another order.

    Args:
        heads: of a layer without an order constraint.
        order: [h], numbers of its K/V heads.
    """
    at = on_device(order, heads.keys)
    return replace(
        heads,
        queries=heads.queries[at],
        keys=heads.keys[at],
        values=heads.values[at],
        outputs=heads.outputs[at],
    )


def pair_losses(channels: Channels) -> tuple[Array, float]:
    """The loss of the joint factorisation of each pair of heads.

    Returns:
        Losses [h, h], symmetric, zero on the diagonal, summed over the axes in front of h; and the
        power of all heads in the same unit.
    """
    xp = array_namespace(channels.rows)
    *others, heads, rows, inputs = channels.rows.shape
    kept = min(rows, _KEPT)
    # each head in its own leading directions
    _, weighted = weigh(channels, groups=heads)
    seen = times(weighted, channels.covariance)
    own = seen @ adjoint(weighted)
    leading = adjoint(xp.linalg.eigh(own)[1][..., -kept:])
    stacked = xp.reshape(leading @ weighted, (*others, heads * kept, inputs))
    products = xp.reshape(leading @ seen, (*others, heads * kept, inputs)) @ adjoint(stacked)
    # the eigenvalues that a pair would drop, for all pairs
    losses = np.zeros((heads, heads))
    numbers = np.arange(heads * kept).reshape(heads, kept)
    for one in range(heads - 1):
        behind = numbers[one + 1 :]
        first = np.broadcast_to(numbers[one], behind.shape)
        pairs = on_device(np.concatenate([first, behind], axis=1), products)
        of_pairs = products[..., pairs[:, :, None], pairs[:, None]]
        dropped = xp.linalg.eigvalsh(of_pairs)[..., :kept]
        by_pair = xp.sum(dropped, axis=(*range(len(others)), -1))
        lost = np.maximum(as_numpy(by_pair), 0.0)
        losses[one, one + 1 :] = losses[one + 1 :, one] = lost
    power = xp.sum(xp.real(xp.linalg.diagonal(own)))
    return losses, float(power)


def group_heads(losses: Array, groups: int) -> Array:
    """Divide heads into groups of equal size with little loss within them: swaps of two heads until
    none helps, from the source's own neighbours, so that the result is never worse than they are,
    and from groups that grow greedily.

    Args:
        losses: [h, h], symmetric: the loss of having two heads in one group.
        groups: number of groups, a divisor of h.

    Returns:
        The heads in their new order, [h]: group after group, in ascending order within a group.
    """
    losses = (losses + losses.T) / 2  # otherwise swaps that seem to gain could go round in circles
    np.fill_diagonal(losses, 0)
    neighbours = np.repeat(np.arange(groups), len(losses) // groups)
    best = _swap_heads(losses, neighbours)
    found = _swap_heads(losses, _grow_groups(losses, groups))
    if _loss_within(losses, found) < _loss_within(losses, best) - _LEAST * losses.sum():
        best = found
    first_of_group = (best[:, None] == best).argmax(1)
    return np.argsort(first_of_group, kind="stable")


def _grow_groups(losses: Array, groups: int) -> Array:
    """Labels [h] of groups that grow one after another: each starts with the remaining head that
    fits the others worst, and takes the head that fits best until it is full.
    """
    labels = np.full(len(losses), groups)
    for label in range(groups):
        is_left = labels == groups
        worst = np.where(is_left, losses @ is_left, -np.inf).argmax()
        labels[worst] = label
        for _ in range(len(losses) // groups - 1):
            best = np.where(labels == groups, losses @ (labels == label), np.inf).argmin()
            labels[best] = label
    return labels


def _swap_heads(losses: Array, labels: Array) -> Array:
    """Labels [h] after the swap of two heads that gains most, again and again until none gains."""
    labels = labels.copy()
    while True:
        is_together = labels[:, None] == labels
        to_group = (
            losses @ is_together
        )  # [h, h]: of each head, to the heads in the group of each other one
        own = np.diag(to_group)
        change = to_group + to_group.T - own[:, None] - own - 2 * losses
        change[is_together] = 0
        one, other = np.unravel_index(change.argmin(), change.shape)
        if change[one, other] >= -_LEAST * losses.sum():
            return labels
        labels[[one, other]] = labels[[other, one]]


def _loss_within(losses: Array, labels: Array) -> float:
    return float(losses[labels[:, None] == labels].sum())
