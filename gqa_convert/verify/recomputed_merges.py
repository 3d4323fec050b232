"""The merges again, in torch: what every number of OUT must be, bit for bit."""

import hashlib
import math
from collections.abc import Iterable
from typing import Any


def wide_dtype(dtype: Any) -> Any:
    """The type that sums are kept in."""
    import torch

    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else torch.float64


def same_bits(a: Any, b: Any) -> bool:
    """Whether two tensors have one type, one shape and the same bytes (so that NaN equals itself and -0.0 is not
    0.0).
    """
    import torch

    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)))


def differing(a: Any, b: Any) -> int:
    """How many numbers of two tensors of one type and shape differ in any bit."""
    import torch

    bits = [x.contiguous().reshape(-1).view(torch.uint8).reshape(x.numel(), -1) for x in (a, b)]
    return int((bits[0] != bits[1]).any(dim=1).sum())


def half_unit(value: Any, dtype: Any) -> Any:
    """Half the distance of neighbouring numbers of a type, around each value."""
    import torch

    limits = torch.finfo(dtype)
    exponent = torch.frexp(value.double().abs().clamp(min=limits.tiny)).exponent
    return torch.exp2(exponent.double() - 1) * (limits.eps / 2)


def merge(heads: Iterable[Any], method: str) -> Any:
    """The merged head of a group.

    Args:
        heads: tensors of one type and shape, in head order; consumed one by one.
        method: mean or first.
    """
    total, count, dtype = None, 0, None
    for head in heads:
        if method == "first":
            return head
        if total is None:
            dtype = head.dtype
            total = head.to(wide_dtype(dtype), copy=True)
        else:
            total += head.to(total.dtype)
        count += 1
    assert total is not None
    return (total / count).to(dtype)


def merge_groups(heads: Any, groups: int, method: str) -> Any:
    """Merged heads that are not rounded yet, [groups, ...], of all heads [heads, ...] in the wide type. Method mean or
    first.
    """
    grouped = heads.unflatten(0, (groups, heads.shape[0] // groups))
    if method == "first":
        return grouped[:, 0]
    total = grouped[:, 0].clone()
    for head in range(1, grouped.shape[1]):
        total += grouped[:, head]
    return total / grouped.shape[1]


def fresh_heads(seed: int, name: str, heads: Any, groups: int) -> Any:
    """The stream of method `random`, not rounded yet, in the place of `groups` heads with the deviation of all [heads,
    ...].
    """
    import numpy as np
    import torch

    wide = wide_dtype(heads.dtype)
    kind: Any = np.float32 if wide == torch.float32 else np.float64
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
    shape = (groups, *heads.shape[1:])
    return torch.from_numpy(
        generator.standard_normal(shape, dtype=kind) * kind(deviation((iter([heads]), iter([heads]))))
    )


def deviation(blocks: Iterable[Iterable[Any]]) -> float:
    """The population standard deviation in float64, in two passes.

    Args:
        blocks: two equal iterations over all numbers, tensors of any shape.
    """
    import torch

    first, second = blocks
    count, total = 0, 0.0
    for block in first:
        count += block.numel()
        total += float(block.to(torch.float64).sum())
    mean = total / count
    squares = sum(float(((block.to(torch.float64) - mean) ** 2).sum()) for block in second)
    return math.sqrt(squares / count)


class FreshNumbers:
    """The documented stream of method `random`: PCG64 seeded by SHA-256 of "seed:name", normal, times the source's
    deviation.

    Two correct sums may differ in their last bits, and so may the deviation. In half precisions OUT must equal, in
    every bit, the stream for one of three neighbouring float32 deviations; in float32 one number in a million may be
    rounded differently.
    """

    def __init__(self, seed: int, name: str, spread: float, dtype: Any) -> None:
        import numpy as np
        import torch

        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        self._generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
        self._dtype = dtype
        self._half = wide_dtype(dtype) == torch.float32
        if self._half:
            middle = np.float32(spread)
            self._alive: list[Any] = [
                middle,
                np.nextafter(middle, np.float32(0)),
                np.nextafter(middle, np.float32(np.inf)),
            ]
        else:
            self._alive = [np.float64(spread)]
        self._seen = 0
        self._off = 0

    def accept(self, actual: Any) -> bool:
        """Whether these numbers, which follow those of the call before, can be the stream's."""
        import numpy as np
        import torch

        normal = self._generator.standard_normal(actual.numel(), dtype=np.float32 if self._half else np.float64)
        flat = actual.reshape(-1)
        if self._half:
            self._alive = [s for s in self._alive if same_bits(torch.from_numpy(normal * s).to(self._dtype), flat)]
            return bool(self._alive)
        expected = torch.from_numpy(normal * self._alive[0])
        self._seen += flat.numel()
        if self._dtype == torch.float64:  # no rounding hides the deviation's last bits here
            return bool(((flat - expected).abs() <= 1e-13 * expected.abs()).all())
        expected = expected.to(self._dtype)
        off = (flat.view(torch.int32).long() - expected.view(torch.int32).long()).abs()
        self._off += int((off != 0).sum())
        return int(off.max()) <= 1 and self._off <= self._seen * 1e-6 if off.numel() else True
