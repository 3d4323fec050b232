"""Divides the sequences of batches among processes."""

from collections.abc import Sequence
from dataclasses import dataclass

from gqa_convert.conversion.fit.lockstep import Batch
from gqa_convert.conversion.fit.processes.group import ALONE, ProcessGroup


@dataclass(frozen=True, slots=True)
class Share:
    """Which of all batches a process sees; of each, it has some of the sequences."""

    numbers: Sequence[int]
    """Of its batches, among all."""
    count: int
    """Of all batches."""
    processes: ProcessGroup = ALONE

    def of(self, numbers: range) -> list[int]:
        """Its own among some numbers of batches."""
        return [number for number in self.numbers if number in numbers]


def own_sequences(batches: Sequence[Batch], processes: ProcessGroup) -> dict[int, Batch]:
    """The sequences that this process computes, by the number of their batch; batches without any are left out.

    The sequences of all batches take turns, so that every stretch of batches is divided evenly.
    """
    if processes.size == 1:
        return dict(enumerate(batches))
    own: dict[int, Batch] = {}
    first = processes.rank  # of this process, in the batch
    for number, batch in enumerate(batches):
        rows = len(batch["input_ids"])
        if first < rows:
            own[number] = {name: tensor[first :: processes.size] for name, tensor in batch.items()}
        first = (first - rows) % processes.size
    return own


def sequences(batches: Sequence[Batch]) -> int:
    """How many sequences batches have."""
    return sum(len(batch["input_ids"]) for batch in batches)
