"""The documented stream of random numbers of method `random`.

Each tensor draws from a PCG64 generator seeded with the SHA-256 of "seed:name", and its normal numbers are scaled by
the standard deviation of SOURCE's tensor.
"""

import hashlib
import math
from collections.abc import Iterable
from typing import Any

from gqa_convert.verify.numbers import same_bits, wide_dtype


def _generator(seed: int, name: str) -> Any:
    import numpy as np

    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


def fresh_heads(seed: int, name: str, heads: Any, groups: int) -> Any:
    """Random heads [groups, ...] with the standard deviation of all heads [heads, ...], not rounded.

    Args:
        seed: OUT's.
        name: the name that the stream is drawn for.
        heads: SOURCE's heads.
        groups: how many heads to draw.
    """
    import numpy as np
    import torch

    kind: Any = np.float32 if wide_dtype(heads.dtype) == torch.float32 else np.float64
    drawn = _generator(seed, name).standard_normal((groups, *heads.shape[1:]), dtype=kind)
    return torch.from_numpy(drawn * kind(deviation((iter([heads]), iter([heads])))))


def deviation(blocks: tuple[Iterable[Any], Iterable[Any]]) -> float:
    """The population standard deviation in float64, in two passes.

    Args:
        blocks: two iterations over the same numbers, tensors of any shape.
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
    """Compares a tensor's numbers with its stream, block by block.

    Two correct sums may differ in their last bits, and with them the standard deviation. In half precision OUT must
    equal, in every bit, the stream for one of three neighbouring float32 deviations. In float32 one number in a million
    may be rounded differently.

    Args:
        seed: OUT's.
        name: the name that the stream is drawn for.
        spread: the standard deviation of SOURCE's numbers.
        dtype: the tensor's type.
    """

    def __init__(self, seed: int, name: str, spread: float, dtype: Any) -> None:
        import numpy as np
        import torch

        self._generator = _generator(seed, name)
        self._dtype = dtype
        self._half = wide_dtype(dtype) == torch.float32
        self._candidates: list[Any] = [np.float64(spread)]
        if self._half:
            middle = np.float32(spread)
            self._candidates = [middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))]
        self._seen = 0
        self._off = 0

    def accept(self, actual: Any) -> bool:
        """Whether these numbers, which follow those of the previous call, agree with the stream."""
        import numpy as np
        import torch

        normal = self._generator.standard_normal(actual.numel(), dtype=np.float32 if self._half else np.float64)
        flat = actual.reshape(-1)
        if self._half:
            self._candidates = [
                spread
                for spread in self._candidates
                if same_bits(torch.from_numpy(normal * spread).to(self._dtype), flat)
            ]
            return bool(self._candidates)
        expected = torch.from_numpy(normal * self._candidates[0])
        self._seen += flat.numel()
        if self._dtype == torch.float64:  # nothing is rounded here that could hide the deviation's last bits
            return bool(((flat - expected).abs() <= 1e-13 * expected.abs()).all())
        expected = expected.to(self._dtype)
        off = (flat.view(torch.int32).long() - expected.view(torch.int32).long()).abs()
        self._off += int((off != 0).sum())
        return int(off.max()) <= 1 and self._off <= self._seen * 1e-6 if off.numel() else True
