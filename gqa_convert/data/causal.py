"""Next tokens, for decoders: blocks of running text and conversations.

Shape legend: b blocks, L tokens of a block.
"""

import numpy as np

from gqa_convert.data.encoders import Encoder, text_encoder
from gqa_convert.data.objectives import SampleSettings
from gqa_convert.data.sampler import IGNORED, Batch, Block, BlockSampler, Keys, Places
from gqa_convert.data.sources import Source, TextSource
from gqa_convert.data.token_files import TokenSource


class CausalSampler(BlockSampler):
    """Blocks for a causal language model. `sequence_length` is the tokens of a block."""

    def __init__(self, settings: SampleSettings) -> None:
        super().__init__(settings, settings.length, following=1)

    def encoder(self, source: Source, text: TextSource) -> Encoder:
        """Running text between special tokens, or conversations; of a stream if it is stated, so
        that a run which goes on need not ask the Hub.
        """
        chats = source.format == "chat" or not text.is_stream
        return text_encoder(source, text, self.settings.tokenizer, closed=True, chats=chats)

    def batch(self, places: Places, keys: Keys) -> Batch:  # noqa: ARG002
        """Blocks of text.

        Returns:
            `input_ids` and `labels` (the next tokens; IGNORED where there is nothing to predict):
            [b, L].
        """
        length = self.length
        ids = np.stack([tokens.read(place.start, length + 1) for tokens, place in places])
        labels = ids[:, 1:].copy()
        for row, (tokens, place) in zip(labels, places, strict=True):
            row[tokens.size - place.before :] = (
                IGNORED  # they are in an earlier block of the epoch, too
            )
            if (
                place.start <= tokens.size - 1 < place.start + length
            ):  # the first token does not follow the last
                row[tokens.size - 1 - place.start] = IGNORED
        return {"input_ids": ids[:, :-1], "labels": labels}

    def first(self, tokens: TokenSource, limit: int) -> list[Block]:
        """Blocks that predict each of the first tokens once, except the very first; the last block
        may be shorter.
        """
        scored = min(limit, tokens.size) - 1
        return [
            Block(start, start + tokens.size - scored) for start in range(0, scored, self.length)
        ]
