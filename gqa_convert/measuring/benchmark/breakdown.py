"""The parts of a decode step's time: attention modules, their projections and whole layers, measured by hooks in
separate steps.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from gqa_convert.families.table import Family
from gqa_convert.measuring.benchmark.timing import Clock, timed

PARTS: Final = ("self", "cross", "projections", "layers")
"""Attention to the text and to an encoder's output, each from the module's call to its return, projections, cache and
position bias included, norms and residual sum left out; the linear projections inside both; whole layers of the
decoder."""

_READ_BYTES = 1 << 29


@dataclass
class Parts:
    """Seconds by part, and the bytes of the projections."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    projection_bytes: int = 0


def attention_modules(model: Any, family: Family) -> Iterator[tuple[str, Any, bool]]:
    """Name, module and whether it attends to an encoder's output, of every attention module outside an encoder."""
    for name, module in model.named_modules():
        places = [place for place in family.attention if f".{name}".endswith(f".{place}")]
        if places and not (family.encoder and f".{family.encoder}." in f".{name}."):
            yield name, module, any(place in family.cross_attention for place in places)


def decoder_blocks(model: Any, family: Family) -> list[Any]:
    """The decoder's layers: the members of the outermost module list that contains its attention."""
    names = [name for name, _, _ in attention_modules(model, family)]
    for name, module in model.named_modules():
        if type(module).__name__ == "ModuleList" and any(attention.startswith(f"{name}.") for attention in names):
            return list(module)
    return []


def projections(module: Any) -> Iterator[Any]:
    """The linear maps inside an attention module."""
    for part in module.modules():
        if type(part).__name__ in ("Linear", "Conv1D"):
            yield part


@contextmanager
def watched(model: Any, family: Family, clock: Clock) -> Iterator[Callable[[], Parts]]:
    """A context with timing hooks on the model. It yields a function that returns what they measured, once the device
    is idle.
    """
    marks: list[tuple[str, Any, Any]] = []
    seen: dict[int, int] = {}
    handles = []

    def hook(module: Any, part: str) -> None:
        begun: list[Any] = []

        def before(*_: Any) -> None:
            begun.append(clock.mark())

        def after(*_: Any) -> None:
            marks.append((part, begun.pop(), clock.mark()))
            if part == "projections":
                seen[id(module)] = sum(each.numel() * each.element_size() for each in module.parameters())

        handles.append(module.register_forward_pre_hook(before))
        handles.append(module.register_forward_hook(after))

    for _, module, cross in attention_modules(model, family):
        hook(module, "cross" if cross else "self")
        for part in projections(module):
            hook(part, "projections")
    for block in decoder_blocks(model, family):
        hook(block, "layers")

    def measured() -> Parts:
        parts = Parts(projection_bytes=sum(seen.values()))
        for part, first, second in marks:
            parts.seconds[part] += clock.seconds(first, second)
        return parts

    try:
        yield measured
    finally:
        for handle in handles:
            handle.remove()


class MemoryReader:
    """Reads a buffer far larger than the processor's caches, as decoding reads weights and keys."""

    def __init__(self, clock: Clock, device: Any, nbytes: int = _READ_BYTES) -> None:
        import torch

        self._clock, self._nbytes = clock, nbytes
        self._buffer = torch.ones(nbytes // 4, device=device)

    def bytes_per_second(self) -> float:
        """The bandwidth of one pass over the buffer, by the faster of a sum and a dot product."""
        import torch

        half = len(self._buffer) // 2
        first, second = self._buffer[:half], self._buffer[half:]
        ways: tuple[Callable[[], object], ...] = (lambda: torch.dot(first, second), self._buffer.sum)
        return self._nbytes / min(timed(self._clock, way) for way in ways)
