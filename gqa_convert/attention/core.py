"""Grouped-query attention as a function of tensors. Repeated keys or values are never materialised on the way forward.

Shape legend: b batch, H query heads, N key/value heads, R = H / N query heads per group, q queries, k keys, c head width,
e head width of the values. `b|1` is an axis of length b or 1.
"""

from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gqa_convert.errors import GroupsError, OptionError

SHORT: Final = 16
"""Up to so many queries, the query heads of a group are packed into the query axis: the keys are then read once per group."""


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
    """softmax(scale * query key^T + bias) value, where R consecutive query heads share a key/value head (Ainslie et al. 2023).

    Half precision is accumulated in float32 by every kernel this reaches. A query that sees no key gives zeros.

    Args:
        query: [b, H, q, c].
        key: [b, N, k, c].
        value: [b, N, k, e].
        mask: bool, broadcastable to [b, H, q, k]; True where a query sees a key.
        bias: float, broadcastable to [b, H, q, k]; added to the scores (T5, ALiBi). -inf hides a key.
        causal: query i sees the keys up to `cached` + i.
        cached: with `causal`, how many keys come before the first query; by default k - q, the queries being the newest tokens.
        scale: factor of the scores; by default 1 / sqrt(c), and 1.0 for none, as in T5.
        dropout: probability with which an attention weight is zeroed.

    Returns:
        [b, H, q, e].

    Raises:
        GroupsError: N does not divide H.
        OptionError: the shapes do not fit together, or an option makes no sense.
    """
    _check_tensors(query, key, value)
    queries, keys = query.shape[2], key.shape[2]
    mask = None if mask is None else _broadcast("mask", mask, query, keys)
    bias = None if bias is None else _broadcast("bias", bias, query, keys)
    if mask is not None and mask.dtype != torch.bool:
        raise OptionError(f"mask has type {mask.dtype}: give booleans, True where a query sees a key, or add a float mask as bias")
    if bias is not None and not bias.is_floating_point():
        raise OptionError(f"bias has type {bias.dtype}: give floats that are added to the scores, or a boolean mask as mask")
    if cached is not None and (not causal or cached < 0):
        raise OptionError(f"cached is {cached}: it counts the keys before the first query of causal attention, and is 0 or more")
    if causal:
        cached = keys - queries if cached is None else cached
        if cached < 0:
            raise OptionError(f"{queries} queries are more than {keys} keys: say by cached how many keys come before the first query")
        keys = min(keys, cached + queries)  # no query sees the rest
        key, value = key[:, :, :keys], value[:, :, :keys]
        mask = None if mask is None else mask[..., :keys]
        bias = None if bias is None else bias[..., :keys]
    if keys == 0:
        return query.new_zeros(*query.shape[:3], value.shape[3])
    hides_later = causal and queries > 1
    native = _has_native_kernel(query, key, value, mask is not None or bias is not None, bias, dropout)
    if native and hides_later and cached == 0 and keys == queries and mask is None and bias is None:
        return scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    may_see_nothing = mask is not None or bias is not None
    if hides_later:
        assert cached is not None
        order = torch.arange(keys, device=query.device) <= torch.arange(queries, device=query.device)[:, None] + cached
        mask = order[None, None] if mask is None else mask & order
    scores, blind = _score_mask(mask, bias, query, may_see_nothing)
    if native and (scores is None or query.is_cpu or query.shape[1] == key.shape[1]):
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=scores, dropout_p=dropout, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    else:
        out = _packed(query, key, value, scores, scale, dropout)
    return out if blind is None else out.masked_fill(blind, 0.0)


def _packed(query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None, scale: float | None, dropout: float) -> Tensor:
    """Attention with the R query heads of a group laid out as R * q queries of one head: [b, N, R * q, c]."""
    (batch, heads, queries, _), groups = query.shape, key.shape[1]
    ratio = heads // groups
    if scores is not None:  # [b|1, H|1, q|1, k] -> [b|1, N|1, R * q, k]
        scores = scores.unsqueeze(2) if scores.shape[1] == 1 else scores.unflatten(1, (groups, ratio))
        scores = scores.expand(-1, -1, ratio, queries, -1).flatten(2, 3)
    packed = query.reshape(batch, groups, ratio * queries, query.shape[3])
    out = scaled_dot_product_attention(packed, key, value, attn_mask=scores, dropout_p=dropout, scale=scale)
    return out.reshape(batch, heads, queries, value.shape[3])


def _has_native_kernel(query: Tensor, key: Tensor, value: Tensor, masked: bool, bias: Tensor | None, dropout: float) -> bool:
    """Whether `enable_gqa` reaches a kernel that reads shared heads in place, and is worth it; others would repeat keys and values."""
    if query.shape[1] == key.shape[1]:
        return True
    width = query.shape[3]
    if query.shape[2] <= SHORT or width != value.shape[3]:
        return False
    if query.is_cpu:
        return dropout == 0.0 and not (bias is not None and bias.requires_grad)
    if query.is_cuda:
        return not masked and query.dtype in (torch.float16, torch.bfloat16) and width <= 256 and width % 8 == 0
    return False


def _score_mask(mask: Tensor | None, bias: Tensor | None, query: Tensor, may_see_nothing: bool) -> tuple[Tensor | None, Tensor | None]:
    """What scaled_dot_product_attention takes as its mask, and the queries [b|1, H|1, q|1, 1] that see nothing, if there may be any.

    Those see everything in the mask returned, as kernels differ in what they make of an empty row; their output is zeroed later.
    """
    if bias is None:
        if mask is None or not may_see_nothing:
            return mask, None
        blind = ~mask.any(-1, keepdim=True)
        return mask | blind, blind
    if not (query.is_cpu and bias.dtype == torch.float32 and query.element_size() == 2):  # the CPU kernels add float32 to half precision
        bias = bias.to(query.dtype)
    scores = bias if mask is None else torch.where(mask, bias, -torch.inf)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0.0), blind


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise OptionError(f"{shapes}: give [batch, heads, length, width]")
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise OptionError(f"{shapes}: batch and head width must agree, and key and value in heads and length")
    if not query.dtype == key.dtype == value.dtype:
        raise OptionError(f"query is {query.dtype}, key {key.dtype}, value {value.dtype}: give one type")
    if not key.shape[1] or query.shape[1] % key.shape[1]:
        raise GroupsError(f"{query.shape[1]} query heads cannot share {key.shape[1]} key/value heads: their number must divide the heads")


def _broadcast(name: str, tensor: Tensor, query: Tensor, keys: int) -> Tensor:
    """The mask or bias as [b|1, H|1, q|1, k], a view."""
    full = (*query.shape[:3], keys)
    short = tensor.dim() > 4 or any(size not in (1, target) for size, target in zip(reversed(tensor.shape), reversed(full), strict=False))
    if short:
        raise OptionError(f"{name} {list(tensor.shape)} cannot be broadcast to [batch, heads, queries, keys] = {list(full)}")
    view = tensor.reshape((1,) * (4 - tensor.dim()) + tuple(tensor.shape))
    return view.expand(-1, -1, -1, keys)
