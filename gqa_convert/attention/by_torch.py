"""Attention by torch's scaled_dot_product_attention.

Shape legend: b batch, H query heads, N key/value heads, R = H / N query heads per group, q queries, k keys, c head_dim, e
head_dim of the values. `b|1` is an axis of length b or 1.
"""

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gqa_convert.attention.masks import and_order
from gqa_convert.attention.row_times import ASSUMED, RowTimes, bfloat16_times

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


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    cached: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(scale * query key^T + bias) value. A query that sees no key gives zeros.

    Args:
        query: [b, H, q, c].
        key: [b, N, k, c].
        value: [b, N, k, e].
        mask: [b|1, H|1, q|1, k] booleans, True where a query sees a key.
        bias: floats of such a shape, added to the scores.
        cached: query i sees the keys up to `cached` + i, where this is given.
        scale: factor of the scores; by default 1 / sqrt(c).
        dropout: probability with which an attention weight is zeroed.

    Returns:
        [b, H, q, e].
    """
    queries, keys = query.shape[2], key.shape[2]
    masked = mask is not None or bias is not None
    square = cached == 0 and keys == queries and not masked
    packing = _packing(query, key, value, square, masked or (cached is not None and not square), bias, dropout)
    if square and packing == 1:
        return _kernel(query, key, value, is_causal=True, dropout_p=dropout, scale=scale)
    if cached is not None:
        mask = and_order(mask, queries, keys, cached, query.device)
    scores, blind = _score_mask(mask, bias, query, masked)
    out = _attend(query, key, value, scores, scale, dropout, packing)
    return out if blind is None else out.masked_fill(blind, 0.0)


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
