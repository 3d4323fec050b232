"""One batch's forward pass through the source or the student, which stops at every attention module."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor

from gqa_convert.conversion.fit.lockstep.greenlets import Paused
from gqa_convert.conversion.fit.lockstep.spilling import Spill

Batch = Mapping[str, Tensor]
"""What the model is called with: tensors by argument."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Where a forward pass has stopped, and what that module was called with."""

    name: str | None = None
    """The attention module, as the checkpoint names it; None where passes only wait for each other, so that weights
    are read once for all of them."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class ForwardPass:
    """A batch's pass through the source or the student."""

    batch: Batch
    paused: Paused
    twin: Self | None = None
    """The source's pass of the same batch, if this is the student's."""
    arrival: Arrival | None = None
    """Where it waits; None before the start and after the end."""
    result: Any = None
    """What the model returned, once the pass has ended."""
    encoded: Any = None
    """The encoder's output, until the student's pass takes it over."""
    spill: Spill | None = None
    """Where tensors go while it waits; None for memory."""
    noted: dict[str, Tensor] = field(default_factory=dict)
    """The residual streams that entered layers on the way, by attention module."""

    def advance(self, answer: Mapping[str, Tensor] | None) -> None:
        """Continue to the next stop, or to the end.

        Args:
            answer: the parameters that the module it waits at runs with; None at the start.
        """
        self.arrival = None  # its tensors must not outlive the frames that they were arguments of
        message = self.paused.resume(answer)
        self.arrival, self.result = (None, message) if self.paused.finished else (message, None)

    def move(self, kept: frozenset[int]) -> None:
        """Move the tensors that it keeps while it waits to files, if it has a spill.

        Args:
            kept: addresses of storages that stay in memory, such as weights.
        """
        if self.spill is not None:
            self.spill.take(
                self.paused.frame, [self.noted, list(self.encoded.values()) if self.encoded else None], kept
            )
