"""Which checkpoints of a run are kept."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keeping:
    """The recipe's keys on keeping checkpoints.

    Attributes:
        newest: how many of the newest are kept, at least one.
        every: checkpoints at multiples of this step are kept; None for none.
        best: whether the one with the lowest loss on the evaluation data is kept.
    """

    newest: int
    every: int | None = None
    best: bool = False


def kept(losses: Mapping[int, float | None], keeping: Keeping) -> set[int]:
    """The steps whose checkpoints are kept.

    Args:
        losses: the loss on the evaluation data at each checkpoint, by step; None where it was not measured.
        keeping: which to keep.
    """
    steps = set(sorted(losses)[-keeping.newest :])
    if keeping.every is not None:
        steps |= {step for step in losses if step % keeping.every == 0}
    measured = {step: loss for step, loss in losses.items() if loss is not None}
    if keeping.best and measured:
        steps.add(min(measured, key=lambda step: (measured[step], step)))
    return steps
