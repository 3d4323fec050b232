"""The decoding kernel as an operator of torch, so that torch.compile can keep them as one call.

Shape legend: b batch, H query heads, N key/value heads, q queries, k keys, c head_dim, e head_dim of the values.
"""

import ctypes
import struct
from functools import cache, lru_cache
from typing import Final

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gqa_convert.attention.decoding.compiling import Kernel, Processor, compiled, processor
from gqa_convert.attention.decoding.shape import BLOCK, FIELDS, MaskKind, Shape, partial_bytes
from gqa_convert.attention.decoding.threads import can_use, run

MOST_ROWS: Final = 32
"""Query heads of a group times queries beyond which torch's kernel, which multiplies matrices, is faster."""

_TYPES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}

_Fields = ctypes.c_int64 * len(FIELDS)

_CHUNK: Final = 256
"""The fewest keys in a chunk where a head's keys are shared out among threads."""

LEAST_KEYS: Final = 128
"""Fewer keys are not worth compiling a kernel for."""

PROCESSOR: Processor | None = processor()
"""Looked up once, where torch.compile does not look."""

_LIBRARY = torch.library.Library("gqa_convert", "DEF")
_LIBRARY.define("decode(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale) -> Tensor")


def supports(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel can compute attention of these tensors, and is worth it. It has no gradient.

    Args:
        query: [b, H, q, c].
        key: [b, N, k, c].
        value: [b, N, k, e].
        bias: what is added to the scores.
    """
    return (
        query.is_cpu
        and _supports_on_cpu(query, key, value)
        and type(query) is type(key) is type(value) is Tensor
        and getattr(forward_ad, "_current_level", -1) < 0  # forward-mode derivatives, which have no public question
        and not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (query, key, value, bias)))
    )


def _supports_on_cpu(query: Tensor, key: Tensor, value: Tensor) -> bool:
    if PROCESSOR is None or query.dtype not in _TYPES or key.shape[2] < LEAST_KEYS:
        return False
    sizes = (query.shape[3], value.shape[3])
    return (
        query.shape[1] // key.shape[1] * query.shape[2] <= MOST_ROWS
        and all(size <= 256 and size % 16 == 0 for size in sizes)
        and key.stride(3) == 1
        and value.stride(3) == 1
    )


def decode(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(scale * query key^T + mask) value. A query that sees no key gives zeros.

    Args:
        query: [b, H, q, c].
        key: [b, N, k, c], whose rows have no gaps.
        value: [b, N, k, e], likewise.
        mask: [b|1, H|1, q|1, k]; booleans are True where a query sees a key, float32 numbers are added to the scores.
        scale: factor of the scores.

    Returns:
        [b, H, q, e].
    """
    return torch.ops.gqa_convert.decode(query, key, value, mask, scale)


def _decode(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    (batch, heads, queries, head_dim), (groups, keys), width = query.shape, key.shape[1:3], value.shape[3]
    out = query.new_empty(batch, heads, queries, width)
    ratio = heads // groups
    rows = ratio * queries
    kind: MaskKind = "none"
    per_row, strides = False, [0, 0, 0]
    if mask is not None:
        if mask.stride(3) != 1:
            mask = mask.contiguous()
        kind = "bool" if mask.dtype == torch.bool else "float"
        strides = [
            0 if size == 1 else step * mask.element_size()
            for size, step in zip(mask.shape[:3], mask.stride()[:3], strict=True)
        ]
        per_row = (strides[1] != 0 and ratio > 1) or strides[2] != 0
    kernel = _kernel(query.dtype, rows, ratio, head_dim, width, kind, per_row)
    threads = torch.get_num_threads()
    sharers = batch * groups
    chunk, chunks = _chunks(sharers, keys, threads)
    # atomic counters: of tasks, and of the finished chunks of each head
    counters = (ctypes.c_int64 * (1 + sharers))()
    partial = torch.empty(sharers * chunks * _partial_bytes(rows, width), dtype=torch.uint8) if chunks > 1 else None
    query = query.contiguous()
    size = query.element_size()
    key_batch, key_head, key_row, _ = key.stride()
    value_batch, value_head, value_row, _ = value.stride()
    fields = _Fields(
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        out.data_ptr(),
        0 if mask is None else mask.data_ptr(),
        0 if partial is None else partial.data_ptr(),
        ctypes.addressof(counters),
        keys,
        chunk,
        chunks,
        sharers * chunks,
        groups,
        queries,
        _bits(scale),
        size * key_batch,
        size * key_head,
        size * key_row,
        size * value_batch,
        size * value_head,
        size * value_row,
        *strides,
    )
    run(kernel, fields, threads if chunks * sharers > 1 and can_use(threads) else 1)
    return out


@cache
def _kernel(
    dtype: torch.dtype, rows: int, ratio: int, head_dim: int, width: int, mask: MaskKind, per_row: bool
) -> Kernel:
    found = PROCESSOR
    assert found is not None
    return compiled(Shape(_TYPES[dtype], rows, ratio, head_dim, width, mask, per_row, found.lanes, found.pairs))


@cache
def _partial_bytes(rows: int, width: int) -> int:
    found = PROCESSOR
    assert found is not None
    return partial_bytes(rows, width, found.lanes)


@cache
def _bits(scale: float) -> int:
    """Those of a float64."""
    return int(struct.unpack("q", struct.pack("d", scale))[0])


def _fake(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:  # noqa: ARG001
    """What torch.compile knows of the result."""
    return query.new_empty(*query.shape[:3], value.shape[3])


_LIBRARY.impl("decode", _decode, "CPU")
torch.library.register_fake("gqa_convert::decode", _fake)


@lru_cache(4096)
def _chunks(heads: int, keys: int, threads: int) -> tuple[int, int]:
    """Keys in a chunk and the number of chunks of each head: what keeps the busiest thread busy the least time."""
    best, least = 1, 0.0
    if threads > 1 and heads % threads:
        for chunks in range(1, max(1, min(-(-4 * threads // heads), keys // _CHUNK)) + 1):
            blocks = -(-keys // (chunks * BLOCK))
            time = -(-heads * chunks // threads) * (blocks * BLOCK + 32)
            if least == 0.0 or time < least:
                best, least = chunks, time
    chunk = -(-keys // (best * BLOCK)) * BLOCK
    return chunk, -(-keys // chunk)
