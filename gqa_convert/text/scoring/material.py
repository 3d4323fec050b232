"""The tokens to score, and the batches of model inputs that predict them.

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
    """The input of one forward pass.

    Attributes:
        inputs: keyword arguments of the forward pass, [b, L].
        rows: [r], indices of the b * L predictions that are scored, row by row.
        targets: [r], the tokens to predict there.
        places: [r], the positions of these tokens among all tokens.
    """

    inputs: dict[str, Integers]
    rows: Integers
    targets: Integers
    places: Integers


class Batches(Protocol):
    """Batches by number, the same for every model with the same tokens."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Batch: ...


@dataclass(frozen=True)
class Material:
    """The tokens of a text, and the text's blocks, which are the same for every tokenizer.

    Attributes:
        ids: [n], the tokens.
        scored: [n], whether each token is scored.
        sizes: [n], the UTF-8 bytes of text that each token covers; None if that is not defined.
        blocks: [n], the number of the block that each belongs to: some kilobytes of a document, or an example.
        block_count: the number of blocks.
        batches: the model inputs.
        fingerprint: a hash of the tokens and of the model inputs.
        note: what was left out or cut, None for nothing.
    """

    ids: Integers
    scored: Booleans
    sizes: Integers | None
    blocks: Integers
    block_count: int
    batches: Batches
    fingerprint: str
    note: str | None = None

    @cached_property
    def tokens(self) -> int:
        """The number of scored tokens."""
        return int(self.scored.sum())

    @cached_property
    def byte_count(self) -> int | None:
        """The bytes of text that the scored tokens cover."""
        return None if self.sizes is None else int(self.sizes[self.scored].sum())

    def by_block(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Sums of the scored tokens' values in each block, in the order of the text: [block_count]."""
        return np.bincount(self.blocks[self.scored], values[self.scored].astype(np.float64), self.block_count).astype(
            np.float64
        )
