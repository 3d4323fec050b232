"""A second objective for decoders, as somebody would add one: each text is to be continued
backwards.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gqa_convert.data.sampler import Batch, Block, CausalSampler, Keys, SampleSettings
from gqa_convert.data.token_files import TokenSource


class BackwardsSampler(CausalSampler):
    """Blocks of running text from their ends to their beginnings."""

    reads = ("text",)

    def __init__(self, settings: SampleSettings) -> None:
        super().__init__(settings)
        self.shortest = self.length + 1

    def batch(self, places: Sequence[tuple[TokenSource, Block]], keys: Keys) -> Batch:  # noqa: ARG002
        """See `Sampler.batch`."""
        rows = [tokens.read(place.start, self.length + 1)[::-1] for tokens, place in places]
        ids: Any = np.stack(rows).astype(np.int64)
        return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
