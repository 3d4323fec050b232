"""Grouped-query attention that also returns its weights, for `need_weights`. Every score is in memory at once, unlike
in core.py.

Shape legend: b batch, H query heads, N key/value heads, q queries, k keys, c head_dim, e head_dim of the values.
"""

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop


def attention_and_weights(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None, dropout: float = 0.0
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
    (batch, heads, queries, head_dim), (groups, keys) = query.shape, key.shape[1:3]
    packed = batch, groups, heads // groups * queries  # query heads of a group as further queries: no key is repeated
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide).reshape(*packed, head_dim) @ key.to(wide).transpose(2, 3) * head_dim**-0.5
    scores = scores.reshape(batch, heads, queries, keys)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    fully_masked = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(fully_masked, 0.0).softmax(-1).masked_fill(fully_masked, 0.0)
    weights = drop(weights, dropout)
    out = weights.reshape(*packed, keys) @ value.to(wide)
    return out.reshape(batch, heads, queries, value.shape[3]).to(query.dtype), weights.to(query.dtype)
