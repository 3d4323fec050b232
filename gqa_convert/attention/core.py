"""Grouped-query attention as a function of tensors, on torch's scaled_dot_product_attention. Keys
and values are never repeated on the way forward.

Shape legend: b batch, H query heads, N key/value heads, R = H / N query heads per group, q queries,
k keys, c head_dim, e head_dim of the values. `b|1` is an axis of length b or 1.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gqa_convert.errors import GroupsError, OptionError

from .masks import Masks, split_mask

SHORT = 48
"""The most queries for which a CPU packs the query heads of a group: 16 to 48 queries behind 4096
keys took 0.6 to 0.9 of `enable_gqa`'s time in bfloat16, 0.8 to 1.1 in float32.
"""


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
    """softmax(scale * query key^T + bias) value, where R consecutive query heads share a key/value
    head (Ainslie et al. 2023).

    Half precision is accumulated in float32 by every kernel this reaches. A query that sees no key
    gives zeros.

    Args:
        query: [b, H, q, c].
        key: [b, N, k, c].
        value: [b, N, k, e].
        mask: [q|1, k] or [b|1, H|1, q|1, k]. Booleans are True where a query sees a key; floats are
            added to the scores.
        bias: float, shaped like `mask`; added to the scores (T5, ALiBi). -inf hides a key.
        causal: query i sees the keys up to `cached` + i.
        cached: with `causal`, how many keys come before the first query; by default k - q, the
            queries being the newest tokens.
        scale: factor of the scores; by default 1 / sqrt(c), and 1.0 for none, as in T5.
        dropout: probability with which an attention weight is zeroed.

    Returns:
        [b, H, q, e].

    Raises:
        GroupsError: N does not divide H.
        OptionError: the shapes do not match, or an option is invalid.
    """
    mask, bias = _checked(query, key, value, mask, bias)
    queries, keys = query.shape[2], key.shape[2]
    if cached is not None and (not causal or cached < 0):
        raise OptionError(
            f"cached is {cached}: it counts the keys before the first query of causal attention, "
            "and is 0 or more"
        )
    if causal:
        cached = keys - queries if cached is None else cached
        if cached < 0:
            raise OptionError(
                f"{queries} queries are more than {keys} keys: "
                "state with cached how many keys come before the first query"
            )
        keys = min(keys, cached + queries)  # no query sees the rest
        key, value = key[:, :, :keys], value[:, :, :keys]
        mask, bias = (None if each is None else each[..., :keys] for each in (mask, bias))
    if keys == 0:
        return query.new_zeros(*query.shape[:3], value.shape[3])
    if queries == 1:
        cached = None  # the only query sees every key that is left
    # the kernel knows the order of a whole prompt by itself; any other order is a mask
    is_prompt = cached == 0 and keys == queries and mask is None and bias is None
    is_masked = mask is not None or bias is not None or (cached is not None and not is_prompt)
    packs = _packs(query, key, value, is_masked=is_masked, is_prompt=is_prompt)
    if query.is_cpu and (dropout != 0.0 or (bias is not None and bias.requires_grad)):
        packs = key.shape[1] < query.shape[1]  # the kernel that shares heads knows neither
    options: dict[str, Any] = {"dropout_p": dropout, "scale": scale}
    if is_prompt and not packs:
        return _kernel(query, key, value, is_causal=True, **options)
    if cached is not None:
        order = torch.arange(queries, device=query.device)[:, None] + cached
        seen = torch.arange(keys, device=query.device) <= order
        mask = seen[None, None] if mask is None else mask & seen
    scores, fully_masked = _score_mask(mask, bias, query)
    attend = _packed if packs else _kernel
    out = attend(query, key, value, attn_mask=scores, **options)
    return out if fully_masked is None else out.masked_fill(fully_masked, 0.0)


def _checked(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None
) -> Masks:
    """The masks as `split_mask` gives them, of tensors whose shapes and types fit together."""
    has_axes = query.dim() == key.dim() == value.dim() == 4
    if not has_axes or key.shape[:3] != value.shape[:3] or query.shape[::3] != key.shape[::3]:
        raise OptionError(
            f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}: "
            "give [batch, heads, length, head_dim] of one batch and head_dim, "
            "and key and value with the same heads and length"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise OptionError(
            f"query is {query.dtype}, key {key.dtype}, value {value.dtype}: give one type"
        )
    heads, kv_heads = query.shape[1], key.shape[1]
    if not kv_heads or heads % kv_heads:
        raise GroupsError(
            f"{heads} query heads cannot share {kv_heads} K/V heads: give a divisor of {heads}"
        )
    return split_mask(mask, bias, (*query.shape[:3], key.shape[2]))


def _packs(query: Tensor, key: Tensor, value: Tensor, *, is_masked: bool, is_prompt: bool) -> bool:
    """Whether the query heads of a group become further queries of one head, so that keys are read
    once for all of them.

    They do unless `enable_gqa` reaches a kernel that reads shared heads in place: on an H200, one
    query behind 4096 keys at a batch of 32 takes it as long as packed queries or less. Other
    kernels would repeat keys and values.
    """
    queries, head_dim = query.shape[2:]
    if query.shape[1] == key.shape[1]:
        return False
    if head_dim != value.shape[3]:
        return True
    if query.is_cpu:
        # packed, a prompt needs a mask for its order, which costs more than it gains
        return queries <= SHORT and not is_prompt
    fits = query.element_size() == 2 and head_dim <= 256 and head_dim % 8 == 0
    return not (query.is_cuda and fits and not is_masked)


def _packed(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, **options: Any
) -> Tensor:
    """Attention with the query heads of a group as further queries of one head: [b, H, q, c] as [b,
    N, R * q, c].
    """
    batch, heads, queries, head_dim = query.shape
    kv_heads = key.shape[1]
    ratio = heads // kv_heads
    query = query.reshape(batch, kv_heads, ratio * queries, head_dim)
    if attn_mask is not None:  # [b|1, H|1, q|1, k] -> [b|1, N|1, R * q, k]
        sizes = (1, 1) if attn_mask.shape[1] == 1 else (kv_heads, ratio)
        attn_mask = attn_mask.unflatten(1, sizes).expand(-1, -1, ratio, queries, -1).flatten(2, 3)
    out = scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **options)
    return out.reshape(batch, heads, queries, value.shape[3])


def _kernel(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    if (
        query.shape[1] == key.shape[1]
    ):  # not as the flag's value: torch.compile refuses a comparison of symbols there
        return scaled_dot_product_attention(query, key, value, **options)
    return scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)


def _score_mask(
    mask: Tensor | None, bias: Tensor | None, query: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """What scaled_dot_product_attention takes as its mask, and the queries [b|1, H|1, q|1, 1] that
    see nothing.

    The latter see everything in the mask returned, as kernels differ in what they make of an empty
    row; their output is zeroed later. On a CPU, where every kernel makes zeros of it, none are
    named.
    """
    scores = mask
    if bias is not None:
        # the CPU kernels add float32 to half precision as it is
        is_wide = query.is_cpu and bias.dtype == torch.float32 and query.element_size() == 2
        bias = bias if is_wide else bias.to(query.dtype)
        scores = bias if mask is None else torch.where(mask, bias, -torch.inf)
    if scores is None or query.is_cpu:
        return scores, None
    hidden = ~scores if bias is None else scores == -torch.inf
    fully_masked = hidden.all(-1, keepdim=True)
    return scores.masked_fill(fully_masked, bias is None), fully_masked
