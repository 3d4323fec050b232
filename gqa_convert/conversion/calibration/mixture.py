"""What is mixed into the user's calibration text, so that the result keeps what this text does not show.

`fit` keeps the source's behaviour on the kind of text that it sees, and loses it elsewhere: calibrated on English prose
alone, SmolLM2-135M from 3 K/V heads to 1 diverges by 0.95 nats per token on code, and by 0.46 where other kinds were mixed
in (docs/results/README.md). A quarter of the blocks therefore comes from

- the source itself, which samples documents and, where it has a chat template, conversations (Liu et al. 2023, LLM-QAT;
  conversations as Xu et al. 2024, Magpie, section 2);
- the sources of the Python standard library;
- made-up records, with questions about them (`made_up_records`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.data.made_up_records import made_up_records
from gqa_convert.data.sources import STDLIB
from gqa_convert.data.stdlib_text import source_files
from gqa_convert.data.text_generation import OwnText

OWN_SHARE = 0.10
"""Of all blocks, half of them conversations where the source writes any."""
CODE_SHARE = 0.08
RECORDS_SHARE = 0.07
MOST = OWN_SHARE + CODE_SHARE + RECORDS_SHARE
_CHARACTERS = 2.4
"""Of a record per token: the longest document fills a block."""
_PARAGRAPH = range(100, 500)
"""Characters of the source's own text among which facts are scattered."""


@dataclass(frozen=True, slots=True)
class MadeUpRecords:
    """Blocks of made-up records.

    Attributes:
        seed: of what is drawn.
        filler: paragraphs of other text.
    """

    seed: int
    filler: Sequence[str] = ()

    def blocks(self, tokenizer: Any, length: int, count: int) -> npt.NDArray[np.int64]:
        """[count * length], the tokens of blocks that each begin with a new document.

        Args:
            tokenizer: a transformers tokenizer.
            length: tokens of a block.
            count: blocks.
        """
        documents = made_up_records(self.seed, round(_CHARACTERS * length), self.filler)
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        made: list[int] = []
        for _ in range(count):
            ids: list[int] = []
            while len(ids) < length:
                ids += [
                    *tokenizer(next(documents), add_special_tokens=False, verbose=False)[
                        "input_ids"
                    ],
                    *end,
                ]
            made += ids[:length]
        return np.array(made, np.int64)


@dataclass(frozen=True, slots=True)
class SharedText:
    """A text that is mixed in, and its share of the blocks."""

    source: Any
    """As `calibration_batches` takes it, or `MadeUpRecords`."""
    share: float
    mixed_in: str
    """What it is, in words."""


def mixed(
    texts: Sequence[Any],
    seed: int,
    documents: OwnText | None = None,
    conversations: OwnText | None = None,
) -> list[SharedText]:
    """What is mixed into the user's texts.

    Args:
        texts: the user's.
        seed: of the records.
        documents: that the source has written; None where it writes none.
        conversations: that it has written; None without a chat template.
    """
    written = {"text of its own": documents, "conversations of its own": conversations}
    written = {kind: text for kind, text in written.items() if text is not None}
    added = [SharedText(text, OWN_SHARE / len(written), kind) for kind, text in written.items()]
    if STDLIB not in texts and source_files(held_out=False):  # which some systems leave out
        added.append(SharedText(STDLIB, CODE_SHARE, "Python sources"))
    filler = []
    if documents is not None:  # its first ones, which are the same however many it writes
        paragraphs = [
            paragraph for text in documents.first_texts() for paragraph in text.split("\n\n")
        ]
        filler = [paragraph for paragraph in paragraphs if len(paragraph) in _PARAGRAPH]
    added.append(SharedText(MadeUpRecords(seed, filler), RECORDS_SHARE, "made-up records"))
    return added
