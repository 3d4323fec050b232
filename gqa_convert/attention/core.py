"""Grouped-query attention as a function of tensors. Repeated keys or values are never materialised on the way forward.

Shape legend: b batch, H query heads, N key/value heads, R = H / N query heads per group, q queries, k keys, c head_dim, e
head_dim of the values. `b|1` is an axis of length b or 1.
"""

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gqa_convert.attention.decoding.operator import decode, supports
from gqa_convert.attention.masks import split_mask
from gqa_convert.attention.row_times import ASSUMED, RowTimes, bfloat16_times
from gqa_convert.errors import GroupsError, OptionError

SHORT: Final = 16
"""The most queries for which the query heads of a group are packed into the query axis, so that keys are read once for
all of them.
"""

SHORT_ON_CPU: Final = 48
"""The same on a CPU: 16 to 48 queries behind 4096 keys took 0.6 to 0.9 of `enable_gqa`'s time in bfloat16, 0.8 to 1.1
in float32.
"""

_BLOCK: Final = 32
"""Rows of queries in a block of the CPU kernel in short calls. Its threads share the blocks of all heads."""


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
    hides_later = causal and queries > 1
    masked = mask is not None or bias is not None
    if dropout == 0.0 and supports(query, key, value, bias):
        if hides_later:
            assert cached is not None
            mask = _and_order(mask, queries, keys, cached, query.device)
        added = mask if bias is None else bias.float()
        if bias is not None and mask is not None:
            added = torch.where(mask, bias.float(), -torch.inf)
        return decode(query, key, value, added, query.shape[3] ** -0.5 if scale is None else scale)
    square = hides_later and cached == 0 and keys == queries and not masked
    packing = _packing(query, key, value, square, masked or (hides_later and not square), bias, dropout)
    if square and packing == 1:
        return _kernel(query, key, value, is_causal=True, dropout_p=dropout, scale=scale)
    if hides_later:
        assert cached is not None
        mask = _and_order(mask, queries, keys, cached, query.device)
    scores, blind = _score_mask(mask, bias, query, masked)
    out = _attend(query, key, value, scores, scale, dropout, packing)
    return out if blind is None else out.masked_fill(blind, 0.0)


def _and_order(mask: Tensor | None, queries: int, keys: int, cached: int, device: torch.device) -> Tensor:
    """The mask without the keys that come after a query."""
    order = torch.arange(keys, device=device) <= torch.arange(queries, device=device)[:, None] + cached
    return order[None, None] if mask is None else mask & order


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None, scale: float | None, dropout: float, packing: int
) -> Tensor:
    """Attention with `packing` query heads of a group laid out as further queries of one head: [b, H / packing, packing
    * q, c].
    """
    batch, heads, queries, head_dim = query.shape
    rows = heads // packing
    if packing > 1:
        query = query.reshape(batch, rows, packing * queries, head_dim)
        if scores is not None and (
            scores.shape[1] > 1 or queries > 1
        ):  # [b|1, H|1, q|1, k] -> [b|1, rows|1, packing * q, k]
            scores = scores.unsqueeze(2) if scores.shape[1] == 1 else scores.unflatten(1, (rows, packing))
            scores = scores.expand(-1, -1, packing, queries, -1).flatten(2, 3)
    repeated = query.is_cpu and query.dtype == torch.bfloat16 and query.shape[2] == 1 and _one_row_is_slow()
    out = _kernel(
        query.expand(-1, -1, 2, -1) if repeated else query,
        key,
        value,
        attn_mask=scores,
        dropout_p=dropout,
        scale=scale,
    )
    out = out[:, :, :1] if repeated else out
    return out if packing == 1 else out.reshape(batch, heads, queries, value.shape[3])


def _kernel(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    if query.shape[1] == key.shape[1]:  # not as the flag's value: torch.compile refuses a comparison of symbols there
        return scaled_dot_product_attention(query, key, value, **options)
    return scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)


def _packing(
    query: Tensor, key: Tensor, value: Tensor, square: bool, masked: bool, bias: Tensor | None, dropout: float
) -> int:
    """How many query heads of a group to pack.

    All of them, unless `enable_gqa` reaches a faster kernel that reads shared heads in place. Other kernels would
    repeat keys and values.
    """
    (batch, heads, queries, head_dim), groups = query.shape, key.shape[1]
    ratio: int = heads // groups
    if ratio == 1 or head_dim != value.shape[3]:
        return ratio
    if query.is_cpu:
        if dropout != 0.0 or (bias is not None and bias.requires_grad):
            return ratio
        # packed, a short prompt needs a mask for its order, which costs more than it gains: float32 took 1.0 to 2.2
        # times as long
        if queries > SHORT_ON_CPU or square:
            return 1
        return _packing_on_cpu(batch * groups, ratio, queries, query.dtype == torch.bfloat16)
    native = (
        query.is_cuda
        and not masked
        and query.dtype in (torch.float16, torch.bfloat16)
        and head_dim <= 256
        and head_dim % 8 == 0
    )
    return 1 if native and queries > SHORT else ratio


def _packing_on_cpu(heads: int, ratio: int, queries: int, bfloat16: bool) -> int:
    """The packing that takes the busiest thread the least time, for `heads` key/value heads in the whole batch.

    Packing reads keys once; packing less makes more work to share out where there are fewer heads than threads.
    """
    threads = 1 if torch.compiler.is_compiling() else torch.get_num_threads()  # the call cannot be traced
    times = _bfloat16_times() if bfloat16 else None
    best, least = ratio, 0.0
    for packing in range(ratio, 0, -1):
        if ratio % packing == 0:
            rows = packing * queries
            blocks = -(-rows // _BLOCK)
            turns = -(-heads * (ratio // packing) * blocks // threads)
            longest = -(-rows // blocks)
            time = turns * (_float32_time(longest) if times is None else times.block(longest))
            if least == 0.0 or time < least:
                best, least = packing, time
    return best


def _float32_time(rows: int) -> float:
    """Time of the CPU kernel for a block of rows of float32, in hundredths of that for one row.

    Measured with 4096 keys of head_dim 128, one thread, 1 to 32 rows: 0.60 to 2.1 ms.
    """
    return 92 + 8 * rows


def _one_row_is_slow() -> bool:
    """Whether the CPU kernel takes longer for one row of bfloat16 than for the same row twice."""
    times = _bfloat16_times()
    return times.one > times.two


def _bfloat16_times() -> RowTimes:
    return ASSUMED if torch.compiler.is_compiling() else bfloat16_times()


def _score_mask(
    mask: Tensor | None, bias: Tensor | None, query: Tensor, may_see_nothing: bool
) -> tuple[Tensor | None, Tensor | None]:
    """What scaled_dot_product_attention takes as its mask, and the queries [b|1, H|1, q|1, 1] that see nothing, if
    there may be any.

    Those see everything in the mask returned, as kernels differ in what they make of an empty row; their output is
    zeroed later.
    """
    may_see_nothing = (
        may_see_nothing and not query.is_cpu
    )  # every kernel there makes zeros of an empty row, by itself and for free
    if bias is None:
        if mask is None or not may_see_nothing:
            return mask, None
        blind = ~mask.any(-1, keepdim=True)
        return mask | blind, blind
    if not (
        query.is_cpu and bias.dtype == torch.float32 and query.element_size() == 2
    ):  # the CPU kernels add float32 to half precision
        bias = bias.to(query.dtype)
    scores = bias if mask is None else torch.where(mask, bias, -torch.inf)
    if not may_see_nothing:
        return scores, None
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0.0), blind


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
