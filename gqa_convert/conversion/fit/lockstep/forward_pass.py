"""One batch's forward pass through the source or the student, which stops at every attention module."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor

from gqa_convert.conversion.fit.lockstep.greenlets import Paused
from gqa_convert.conversion.fit.lockstep.spilling import Spill

Batch = Mapping[str, Tensor]
"""The inputs of the model: tensors by argument."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """The point at which a forward pass has paused, with the arguments of the module's call."""

    name: str | None = None
    """The attention module's name in the checkpoint; None at a stop whose only purpose is that weights are read once
    for all passes.
    """
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class ForwardPass:
    """A forward pass of one batch through the source or the student."""

    batch: Batch
    paused: Paused
    twin: Self | None = None
    """The source's pass of the same batch, if this is the student's."""
    arrival: Arrival | None = None
    """The point at which it is paused; None before the start and after the end."""
    result: Any = None
    """The model's output, once the pass has ended."""
    encoded: Any = None
    """The encoder's output, until the student's pass reuses it."""
    spill: Spill | None = None
    """The files to which tensors are moved while it is paused; None to keep them in memory."""
    noted: dict[str, Tensor] = field(default_factory=dict)
    """The residual streams that entered the layers so far, by attention module."""

    def advance(self, answer: Mapping[str, Tensor] | None) -> None:
        """Continue to the next stop, or to the end.

        Args:
            answer: the parameters with which the paused module runs; None at the start.
        """
        self.arrival = None  # release its tensors no later than the frames that received them as arguments
        message = self.paused.resume(answer)
        self.arrival, self.result = (None, message) if self.paused.finished else (message, None)

    def move(self, kept: frozenset[int]) -> None:
        """Move the tensors of the paused pass to files, if it has a spill.

        Args:
            kept: addresses of storages that stay in memory, such as weights.
        """
        if self.spill is not None:
            self.spill.take(
                self.paused.frame, [self.noted, list(self.encoded.values()) if self.encoded else None], kept
            )
