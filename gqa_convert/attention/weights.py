"""Grouped-query attention that also returns its weights, for `need_weights`. Every score is in memory at once, unlike
in core.py.

Shape legend: b batch, H query heads, N key/value heads, q queries, k keys, c head_dim, e head_dim of the values.
"""

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop


def attention_and_weights(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor]:
    """softmax(query key^T / sqrt(c) + bias) value, and the softmax. Half precision is computed in float32.

    Args:
        query: [b, H, q, c].
        key: [b, N, k, c].
        value: [b, N, k, e].
        mask: bool, [b|1, H|1, q|1, k]; True where a query sees a key.
        bias: float, [b|1, H|1, q|1, k]; added to the scores.
        dropout: probability with which a weight is zeroed.

    Returns:
        The outputs [b, H, q, e], and the weights [b, H, q, k] by which the values were summed. Both are zeros for a
        query that sees no key.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    ratio = query.shape[1] // key.shape[1]
    keys, values = (each.to(wide).repeat_interleave(ratio, dim=1) for each in (key, value))
    scores = query.to(wide) @ keys.transpose(2, 3) * query.shape[3] ** -0.5
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    fully_masked = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(fully_masked, 0.0).softmax(-1).masked_fill(fully_masked, 0.0)
    weights = drop(weights, dropout)
    return (weights @ values).to(query.dtype), weights.to(query.dtype)
