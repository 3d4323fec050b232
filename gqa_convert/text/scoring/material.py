"""What is scored: tokens that a model is to predict, and batches of what it reads to do so.

Shape legend: n tokens, b rows of a batch, L positions of a row, r predictions of a batch that count.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Booleans = npt.NDArray[np.bool_]


class Batch(NamedTuple):
    """What a model reads at once.

    Attributes:
        inputs: keyword arguments of its forward pass, [b, L].
        rows: [r], which of the b * L predictions count, row by row.
        targets: [r], the tokens that come there.
        places: [r], their places among all tokens.
    """

    inputs: dict[str, Integers]
    rows: Integers
    targets: Integers
    places: Integers


class Batches(Protocol):
    """Batches by number, the same for every model with the same tokens and on any number of processes."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Batch: ...


@dataclass(frozen=True)
class Material:
    """Tokens as a tokenizer makes them of the text, and their blocks, which are the same for every tokenizer.

    Attributes:
        ids: [n].
        scored: [n], which of them are predicted.
        sizes: [n], the bytes of text that each stands for, in UTF-8; None where that makes no sense.
        blocks: [n], the number of the block that each belongs to: some kilobytes of a document, or an example.
        block_count: how many blocks there are.
        batches: what to read.
        fingerprint: a hash of the tokens and of what is read to predict them.
        truncated: how many examples are longer than the model reads, and were cut.
    """

    ids: Integers
    scored: Booleans
    sizes: Integers | None
    blocks: Integers
    block_count: int
    batches: Batches
    fingerprint: str
    truncated: int = 0

    @cached_property
    def tokens(self) -> int:
        """How many are scored."""
        return int(self.scored.sum())

    @cached_property
    def byte_count(self) -> int | None:
        """Bytes of text that the scored tokens stand for."""
        return None if self.sizes is None else int(self.sizes[self.scored].sum())

    def by_block(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Sums of the scored tokens' values in each block, in the order of the text: [block_count]."""
        return np.bincount(self.blocks[self.scored], values[self.scored].astype(np.float64), self.block_count).astype(
            np.float64
        )
