"""The decoding kernels for CUDA, in Triton: a few rows of queries against the keys and values of one head.

The rows are the queries of all query heads that share the head, so that its keys and values are read once. Blocks of
keys are dealt out in turn to the programs of a head (Dao et al. 2023, *Flash-Decoding*), so that an unused end of the
cache costs each of them the same. A program keeps a softmax that continues from block to block (Milakov and Gimelshein
2018; Dao 2023, *FlashAttention-2*). A second kernel joins what the programs of a head found.

Sums and softmax are float32; half precision multiplies weights in the type of the values.
"""

from typing import Final

import triton
import triton.language as tl

MOST_SPLITS: Final = tl.constexpr(128)
"""Programs that share a head, at most; a power of two."""

_AT_ONCE: Final = tl.constexpr(16)
"""Blocks whose mask, or programs whose results, are looked at together."""


@triton.jit
def _seen_blocks(mask, keys, mask_key, split, splits, count, KIND: tl.constexpr, TILE_KEYS: tl.constexpr):
    """The first of a program's `count` blocks of which any key is seen, and the one behind the last."""
    first, stop = count, 0
    for start in range(0, count, _AT_ONCE):
        blocks = start + tl.arange(0, _AT_ONCE)
        places = (split + blocks * splits)[:, None] * TILE_KEYS + tl.arange(0, TILE_KEYS)[None, :]
        inside = places < keys
        at = mask + places.to(tl.int64) * mask_key
        if KIND == "bool":
            seen = tl.load(at, mask=inside, other=0) != 0
        else:
            seen = tl.load(at, mask=inside, other=float("-inf")) != float("-inf")
        seen = tl.max(seen.to(tl.int32), 1) > 0
        first = tl.minimum(first, tl.min(tl.where(seen, blocks, count), 0))
        stop = tl.maximum(stop, tl.max(tl.where(seen, blocks + 1, 0), 0))
    return first, stop


@triton.jit(
    do_not_specialize=["keys", "groups", "splits", "mask_batch", "mask_head", "mask_query"]
)  # they change from step to step, and Triton would compile the kernel anew for multiples of 16
def attend_splits(
    query,  # [b, N * RATIO, QUERIES, HEAD_DIM]
    key,  # [b, N, keys, HEAD_DIM]
    value,  # [b, N, keys, VALUE_HEAD_DIM]
    mask,  # [b|1, N * RATIO|1, QUERIES|1, keys]: KIND is "none", "bool" (bytes), or "float" (float32, added to the scores)
    out,  # [b * N, RATIO * QUERIES, VALUE_HEAD_DIM]; where SPLIT float32 [b * N, splits, ..], weighted sums of values
    maxima,  # where SPLIT: [b * N, splits, RATIO * QUERIES], greatest scores
    sums,  # where SPLIT: likewise, sums of exp(score - greatest)
    scale,
    keys,
    groups,  # N
    splits,
    query_batch,
    query_head,
    query_row,
    key_batch,
    key_head,
    key_row,
    value_batch,
    value_head,
    value_row,
    mask_batch,
    mask_head,
    mask_query,
    mask_key,
    RATIO: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_HEAD_DIM: tl.constexpr,
    KIND: tl.constexpr,
    PER_ROW: tl.constexpr,  # the mask differs between query heads of a group, or between queries
    SPLIT: tl.constexpr,  # several programs share a head
    TILE_ROWS: tl.constexpr,  # powers of two, no less than what they hold, and no less than 16
    TILE_KEYS: tl.constexpr,
    TILE_HEAD_DIM: tl.constexpr,
    TILE_VALUE_HEAD_DIM: tl.constexpr,
):
    """Attention of the rows of one head to the program's blocks of keys. Rows that see none of them get zeros."""
    program = tl.program_id(0)
    split = program % splits
    head = program // splits
    batch = (head // groups).to(tl.int64)
    group = (head % groups).to(tl.int64)

    rows = tl.arange(0, TILE_ROWS)
    present = rows < RATIO * QUERIES
    heads = group * RATIO + rows // QUERIES
    places = rows % QUERIES
    columns = tl.arange(0, TILE_KEYS)
    features = tl.arange(0, TILE_HEAD_DIM)
    value_features = tl.arange(0, TILE_VALUE_HEAD_DIM)

    query_rows = query + batch * query_batch + heads * query_head + places * query_row
    queries = tl.load(
        query_rows[:, None] + features[None, :], mask=present[:, None] & (features < HEAD_DIM)[None, :], other=0.0
    )
    mask += batch * mask_batch
    if PER_ROW:
        mask_rows = mask + heads * mask_head + places * mask_query
    else:
        mask += group * RATIO * mask_head

    first = 0
    stop = tl.cdiv(tl.cdiv(keys, TILE_KEYS) - split, splits)
    if KIND != "none" and not PER_ROW:
        first, stop = _seen_blocks(mask, keys, mask_key, split, splits, stop, KIND, TILE_KEYS)

    start = ((split + first * splits) * TILE_KEYS + columns).to(tl.int64)
    key_at = key + batch * key_batch + group * key_head + start[None, :] * key_row + features[:, None]
    value_at = value + batch * value_batch + group * value_head + start[:, None] * value_row + value_features[None, :]
    step = (splits * TILE_KEYS).to(tl.int64)

    greatest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    result = tl.zeros([TILE_ROWS, TILE_VALUE_HEAD_DIM], tl.float32)
    for block in range(first, stop):
        begin = (split + block * splits) * TILE_KEYS
        inside = columns < keys - begin
        found = tl.load(key_at, mask=inside[None, :] & (features < HEAD_DIM)[:, None], other=0.0)
        scores = tl.dot(queries, found, input_precision="ieee") * scale
        seen = inside[None, :]
        if KIND != "none":
            key_places = (begin + columns).to(tl.int64) * mask_key
            if PER_ROW:
                mask_at = mask_rows[:, None] + key_places[None, :]
                seen = seen & present[:, None]
            else:
                mask_at = mask + key_places[None, :]
            if KIND == "bool":
                seen = tl.load(mask_at, mask=seen, other=0) != 0
            else:
                added = tl.load(mask_at, mask=seen, other=float("-inf"))
                seen = added != float("-inf")
                scores += added
        scores = tl.where(seen, scores, float("-inf"))  # also where a hidden key is NaN

        best = tl.maximum(greatest, tl.max(scores, 1))
        shift = tl.where(best == float("-inf"), 0.0, best)
        factor = tl.exp(greatest - shift)
        weights = tl.exp(scores - shift[:, None])
        total = total * factor + tl.sum(weights, 1)
        greatest = best

        found = tl.load(value_at, mask=inside[:, None] & (value_features < VALUE_HEAD_DIM)[None, :], other=0.0)
        if KIND != "none":  # a weight of zero does not rid the sum of NaN
            of_use = tl.max(seen.to(tl.int32), 0) > 0
            found = tl.where(of_use[:, None], found, 0.0)
        result = tl.dot(weights.to(found.dtype), found, result * factor[:, None], input_precision="ieee")
        key_at += step * key_row
        value_at += step * value_row

    out_rows = (program if SPLIT else head).to(tl.int64) * (RATIO * QUERIES) + rows
    out_at = out + out_rows[:, None] * VALUE_HEAD_DIM + value_features[None, :]
    if SPLIT:
        tl.store(maxima + out_rows, greatest, mask=present)
        tl.store(sums + out_rows, total, mask=present)
    else:
        result /= tl.where(total == 0.0, 1.0, total)[:, None]
    result = result.to(out.dtype.element_ty)
    tl.store(out_at, result, mask=present[:, None] & (value_features < VALUE_HEAD_DIM)[None, :])


@triton.jit(do_not_specialize=["rows", "splits"])
def join_splits(
    parts,  # [b * N, splits, rows, VALUE_HEAD_DIM]
    maxima,  # [b * N, splits, rows]
    sums,  # [b * N, splits, rows]
    out,  # [b * N, rows, VALUE_HEAD_DIM]
    rows,
    splits,
    VALUE_HEAD_DIM: tl.constexpr,
    TILE_VALUE_HEAD_DIM: tl.constexpr,
):
    """One row: what the programs of its head found, relative to the greatest score of all."""
    program = tl.program_id(0).to(tl.int64)
    base = program // rows * splits * rows + program % rows
    features = tl.arange(0, TILE_VALUE_HEAD_DIM)
    numbers = tl.arange(0, MOST_SPLITS)
    found = tl.load(maxima + base + numbers * rows, mask=numbers < splits, other=float("-inf"))
    best = tl.max(found, 0)
    shift = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(tl.exp(found - shift) * tl.load(sums + base + numbers * rows, mask=numbers < splits, other=0.0), 0)
    result = tl.zeros([TILE_VALUE_HEAD_DIM], tl.float32)
    for start in range(0, splits, _AT_ONCE):
        some = start + tl.arange(0, _AT_ONCE)
        at = base + some * rows
        factor = tl.exp(tl.load(maxima + at, mask=some < splits, other=float("-inf")) - shift)
        part = tl.load(
            parts + at[:, None] * VALUE_HEAD_DIM + features[None, :],
            mask=(some < splits)[:, None] & (features < VALUE_HEAD_DIM)[None, :],
            other=0.0,
        )
        result += tl.sum(factor[:, None] * part, 0)
    result /= tl.where(total == 0.0, 1.0, total)
    tl.store(out + program * VALUE_HEAD_DIM + features, result.to(out.dtype.element_ty), mask=features < VALUE_HEAD_DIM)
