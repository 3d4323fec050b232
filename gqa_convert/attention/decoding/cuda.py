"""Decoding on CUDA: which calls the Triton kernels take, their launch, and torch's kernels wherever they fail.

Shape legend: b batch, H query heads, N key/value heads, R = H / N, q queries, k keys, c head_dim, e head_dim of the values.
"""

import warnings
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Final

import torch
from torch import Tensor

from gqa_convert.attention.by_torch import attend

MOST_ROWS: Final = 32
"""Query heads of a group times queries beyond which torch's kernels, with larger tiles, are left alone."""

LEAST_KEYS: Final = 128
"""Fewer keys are not worth two launches."""

WIDEST: Final = 256
"""The largest head_dim, also of the values."""

_MOST_SPLITS: Final = 128
"""That of the kernels, which cannot be imported without Triton."""

_TOLERANCE: Final = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""How far the kernels may be from float64 on normally distributed numbers. Also the types that they take."""

ready: bool = torch.version.cuda is not None
"""Whether the kernels are tried. False as soon as they failed once in this process."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a program works.

    Attributes:
        keys: of a block.
        warps: of a program.
        stages: blocks on their way from memory at a time.
    """

    keys: int
    warps: int
    stages: int


_TILES: Final = {
    (2, 64): Tiles(64, 4, 3),
    (2, 128): Tiles(64, 4, 3),
    (2, 256): Tiles(32, 8, 3),
    (4, 64): Tiles(32, 4, 3),
    (4, 128): Tiles(16, 4, 3),
    (4, 256): Tiles(16, 8, 2),
}
"""Bytes of a number, head_dim up to -> tiles. No GPU timed them. They were chosen by what the compiler reports: the forms
tried take at most 92 of the 99 KiB of shared memory that all GPUs of compute capability 8.0 and later have, and 64 to 186
registers, of which they spill none or two.
"""

_LARGEST_BLOCK: Final = max(found.keys for found in _TILES.values())


@dataclass(frozen=True, slots=True)
class _Form:
    """What the kernels are compiled for."""

    device: torch.device
    dtype: torch.dtype
    ratio: int
    queries: int
    head_dim: int
    value_head_dim: int
    kind: str
    per_row: bool
    split: bool


_proven: set[_Form] = set()


def supports(query: Tensor, key: Tensor, value: Tensor, masked: bool) -> bool:
    """Whether the kernels can compute attention of these tensors, and no kernel of torch's is made for it.

    torch has FlashAttention-2 (Dao 2023), which also splits the keys, for half precision without a mask.

    Args:
        query: [b, H, q, c].
        key: [b, N, k, c].
        value: [b, N, k, e].
        masked: something is added to the scores or hides keys.
    """
    head_dim, value_head_dim = query.shape[3], value.shape[3]
    flash = not masked and query.element_size() == 2 and head_dim == value_head_dim and head_dim % 8 == 0
    return (
        ready
        and query.dtype in _TOLERANCE
        and not flash
        and key.shape[2] >= LEAST_KEYS
        and 1 <= query.shape[1] // key.shape[1] * query.shape[2] <= MOST_ROWS
        and max(head_dim, value_head_dim) <= WIDEST
        and key.stride(3) == 1
        and value.stride(3) == 1
    )


def decode(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(scale * query key^T + mask) value by the kernels, or by torch with a warning once they failed.

    Before the first result of a compiled form is used, the form has to reproduce attention in float64 on a small input.

    Args:
        query: [b, H, q, c].
        key: [b, N, k, c].
        value: [b, N, k, e].
        mask: [b|1, H|1, q|1, k]; booleans are True where a query sees a key, float32 numbers are added to the scores.
        scale: factor of the scores.

    Returns:
        [b, H, q, e].
    """
    if ready:
        try:
            with torch.cuda.device_of(query):
                blocks = -(-key.shape[2] // _LARGEST_BLOCK)
                splits = _splits(query.shape[0] * key.shape[1], blocks, _room(query.device))
                form = _form(query, key, value, mask, splits > 1)
                if form in _proven or (not _capturing(query) and _prove(form)):
                    return launch(query, key, value, mask, scale, splits)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            _give_up(error)
    boolean = mask is not None and mask.dtype == torch.bool
    return attend(query, key, value, mask if boolean else None, None if boolean else mask, scale=scale)


def launch(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, splits: int) -> Tensor:
    """What `decode` computes, by the kernels, with `splits` programs for each of the b * N heads."""
    from gqa_convert.attention.decoding import triton_kernels as kernels

    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    (batch, heads, queries, head_dim), (groups, keys), width = query.shape, key.shape[1:3], value.shape[3]
    rows, sharers = heads // groups * queries, batch * groups
    form, tile = _form(query, key, value, mask, splits > 1), tiles(query.element_size(), max(head_dim, width), rows)
    out = query.new_empty(batch, heads, queries, width)
    parts = query.new_empty(sharers * splits * rows, width, dtype=torch.float32) if form.split else out
    maxima, sums = query.new_empty(2, sharers * splits * rows if form.split else 1, dtype=torch.float32)
    kernels.attend_splits[(sharers * splits,)](
        query,
        key,
        value,
        query if mask is None else mask.view(torch.uint8) if form.kind == "bool" else mask,
        parts,
        maxima,
        sums,
        scale,
        keys,
        groups,
        splits,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        *_mask_strides(mask),
        RATIO=form.ratio,
        QUERIES=queries,
        HEAD_DIM=head_dim,
        VALUE_HEAD_DIM=width,
        KIND=form.kind,
        PER_ROW=form.per_row,
        SPLIT=form.split,
        TILE_ROWS=power_of_two(rows),
        TILE_KEYS=tile.keys,
        TILE_HEAD_DIM=power_of_two(head_dim),
        TILE_VALUE_HEAD_DIM=power_of_two(width),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if form.split:
        kernels.join_splits[(sharers * rows,)](
            parts,
            maxima,
            sums,
            out,
            rows,
            splits,
            VALUE_HEAD_DIM=width,
            TILE_VALUE_HEAD_DIM=power_of_two(width),
            num_warps=2,
        )
    return out


def tiles(size: int, width: int, rows: int) -> Tiles:
    """The tiles for numbers of `size` bytes, the larger head_dim, and query heads of a group times queries."""
    found = _TILES[size, max(64, power_of_two(width))]
    return found if rows <= 16 else replace(found, warps=8)


def power_of_two(size: int) -> int:
    """The next one, at least 16, as products of matrices demand."""
    return max(16, 1 << (size - 1).bit_length())


def _mask_strides(mask: Tensor | None) -> list[int]:
    if mask is None:
        return [0, 0, 0, 0]
    return [0 if size == 1 else step for size, step in zip(mask.shape, mask.stride(), strict=True)]


def _form(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, split: bool) -> _Form:
    ratio = query.shape[1] // key.shape[1]
    strides = _mask_strides(mask)
    kind = "none" if mask is None else "bool" if mask.dtype == torch.bool else "float"
    per_row = (strides[1] != 0 and ratio > 1) or strides[2] != 0
    head_dims = (query.shape[3], value.shape[3])
    return _Form(query.device, query.dtype, ratio, query.shape[2], *head_dims, kind, per_row, split)


@lru_cache(4096)
def _splits(sharers: int, blocks: int, room: int) -> int:
    """Programs for each of `sharers` heads of `blocks` blocks of keys, `room` programs running at a time: what takes the
    fewest blocks one after the other. A join counts as two.
    """
    best, least = 1, -(-sharers // room) * blocks
    for splits in range(2, min(blocks, _MOST_SPLITS) + 1):
        time = -(-sharers * splits // room) * -(-blocks // splits) + 2
        if time < least:
            best, least = splits, time
    return best


@cache
def _room(device: torch.device) -> int:
    """Programs that run at a time: two per multiprocessor."""
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        raise RuntimeError(
            f"it needs compute capability 8.0, and {torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
        )
    return 2 * int(torch.cuda.get_device_properties(device).multi_processor_count)


def _capturing(query: Tensor) -> bool:
    """Whether a CUDA graph is being recorded, which compiling would break."""
    return bool(query.is_cuda and torch.cuda.is_current_stream_capturing())


def _prove(form: _Form) -> bool:
    """Compare a form with attention in float64, on random numbers that leave the device's generator alone."""
    chance = torch.Generator().manual_seed(0)
    groups, splits = 2, 3 if form.split else 1
    heads, queries = groups * form.ratio, form.queries
    # some blocks and the beginning of another
    keys = 2 * splits * _LARGEST_BLOCK + 5

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance)

    query = numbers(1, heads, queries, form.head_dim).to(form.dtype)
    key = numbers(1, groups, keys, form.head_dim).to(form.dtype)
    value = numbers(1, groups, keys, form.value_head_dim).to(form.dtype)
    mask: Tensor | None = None
    if form.kind != "none":
        mask = numbers(1, heads, queries, keys) if form.per_row else numbers(1, 1, 1, keys)
        shown = mask > 0.5
        mask = shown if form.kind == "bool" else mask.masked_fill(shown, -torch.inf)
    device = form.device
    mask_there = None if mask is None else mask.to(device)
    found = launch(query.to(device), key.to(device), value.to(device), mask_there, form.head_dim**-0.5, splits)
    key, value = (x.double().repeat_interleave(form.ratio, dim=1) for x in (key, value))
    scores = query.double() @ key.mT * form.head_dim**-0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if form.kind == "bool" else scores + mask
    expected = scores.softmax(-1) @ value
    error = (found.double().cpu() - expected).abs().max().item()
    if not error <= _TOLERANCE[form.dtype]:  # NaN fails, too
        raise ArithmeticError(f"results differ from attention in float64 by {error:.2g}")
    _proven.add(form)
    return True


def _give_up(error: Exception) -> None:
    """Warn, and leave decoding to torch for the rest of the process."""
    global ready
    ready = False
    reason = str(error).strip().split("\n")[0]
    warnings.warn(
        f"torch's kernels decode on CUDA, because the Triton kernel does not work here: {type(error).__name__}: {reason}",
        RuntimeWarning,
        stacklevel=2,
    )
