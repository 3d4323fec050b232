"""Grouped-query attention as a function of tensors. Repeated keys or values are never materialised on the way forward.

Shape legend: b batch, H query heads, N key/value heads, R = H / N query heads per group, q queries, k keys, c head_dim, e
head_dim of the values. `b|1` is an axis of length b or 1.
"""

from torch import Tensor

from gqa_convert.attention.by_torch import attend
from gqa_convert.attention.masks import split_mask
from gqa_convert.errors import GroupsError, OptionError


def grouped_query_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    cached: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(scale * query key^T + bias) value, where R consecutive query heads share a key/value head (Ainslie et al.
    2023).

    Half precision is accumulated in float32 by every kernel this reaches. A query that sees no key gives zeros.

    Args:
        query: [b, H, q, c].
        key: [b, N, k, c].
        value: [b, N, k, e].
        mask: [q|1, k] or [b|1, H|1, q|1, k]. Booleans are True where a query sees a key; floats are added to the
            scores.
        bias: float, shaped like `mask`; added to the scores (T5, ALiBi). -inf hides a key.
        causal: query i sees the keys up to `cached` + i.
        cached: with `causal`, how many keys come before the first query; by default k - q, the queries being the newest
            tokens.
        scale: factor of the scores; by default 1 / sqrt(c), and 1.0 for none, as in T5.
        dropout: probability with which an attention weight is zeroed.

    Returns:
        [b, H, q, e].

    Raises:
        GroupsError: N does not divide H.
        OptionError: the shapes do not match, or an option is invalid.
    """
    _check_tensors(query, key, value)
    queries, keys = query.shape[2], key.shape[2]
    mask, bias = split_mask(mask, bias, (query.shape[0], query.shape[1], queries, keys))
    if cached is not None and (not causal or cached < 0):
        raise OptionError(
            f"cached is {cached}: it counts the keys before the first query of causal attention, and is 0 or more"
        )
    if causal:
        cached = keys - queries if cached is None else cached
        if cached < 0:
            raise OptionError(
                f"{queries} queries are more than {keys} keys: state with cached how many keys come before the first query"
            )
        keys = min(keys, cached + queries)  # no query sees the rest
        key, value = key[:, :, :keys], value[:, :, :keys]
        mask = None if mask is None else mask[..., :keys]
        bias = None if bias is None else bias[..., :keys]
    if keys == 0:
        return query.new_zeros(*query.shape[:3], value.shape[3])
    if queries == 1:
        cached = None  # the only query sees every key that is left
    return attend(query, key, value, mask, bias, cached=cached, scale=scale, dropout=dropout)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    if (query.dim(), key.dim(), value.dim()) != (4, 4, 4):
        raise OptionError(f"{_shapes(query, key, value)}: give [batch, heads, length, head_dim]")
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise OptionError(
            f"{_shapes(query, key, value)}: batch and head_dim must agree, and key and value must agree in heads and length"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise OptionError(f"query is {query.dtype}, key {key.dtype}, value {value.dtype}: give one type")
    if not key.shape[1] or query.shape[1] % key.shape[1]:
        raise GroupsError(
            f"{query.shape[1]} query heads cannot share {key.shape[1]} key/value heads: give a divisor of {query.shape[1]}"
        )


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> str:
    return f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
