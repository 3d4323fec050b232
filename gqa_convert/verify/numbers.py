"""Compares tensors bit by bit, and the roundings that floating-point types allow for."""

from typing import Any


def wide_dtype(dtype: Any) -> Any:
    """The type that sums of numbers of a type are kept in."""
    import torch

    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else torch.float64


def same_bits(a: Any, b: Any) -> bool:
    """Whether two tensors have the same type, shape and bytes. NaN equals itself, and -0.0 differs from 0.0."""
    import torch

    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    ours, theirs = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b))
    return bool(torch.equal(*_as_words(ours, theirs)))


def _as_words(*buffers: Any) -> tuple[Any, ...]:
    """Bytes [n] of equal length in the largest words that fit them all, because torch compares word by word."""
    import torch

    for word in (torch.int64, torch.int32, torch.int16):
        if all(buffer.numel() % word.itemsize == buffer.storage_offset() % word.itemsize == 0 for buffer in buffers):
            return tuple(buffer.view(word) for buffer in buffers)
    return buffers


def differing(a: Any, b: Any) -> int:
    """How many numbers of two tensors of one type and shape differ in any bit."""
    import torch

    bits = [x.contiguous().reshape(-1).view(torch.uint8).reshape(x.numel(), -1) for x in (a, b)]
    return int((bits[0] != bits[1]).any(dim=1).sum())


def bits_differ(ours: Any, theirs: Any) -> str | None:
    """How many numbers differ, in words; None if the tensors have the same bits."""
    return None if same_bits(ours, theirs) else f"{differing(ours, theirs)} number(s)"


def half_unit(value: Any, dtype: Any) -> Any:
    """Half the distance between neighbouring numbers of a type, around each value."""
    import torch

    limits = torch.finfo(dtype)
    exponent = torch.frexp(value.double().abs().clamp(min=limits.tiny)).exponent
    return torch.exp2(exponent.double() - 1) * (limits.eps / 2)


def rounding(tensor: Any, dtype: Any) -> Any:
    """An upper bound, number for number, of the error that rounding to a type makes."""
    import torch

    limits = torch.finfo(dtype)
    return tensor.abs() * (limits.eps / 2) + limits.tiny * limits.eps / 2
