"""The first token of the decoder's input."""

from pathlib import Path
from typing import Any

from gqa_convert.data.encoders import end_of_text
from gqa_convert.data.span_corruption import has_sentinels
from gqa_convert.families.loading import read_object
from gqa_convert.families.records import record_of
from gqa_convert.runtime.json_objects import Config


def decoder_start(folder: Path, config: Config, tokenizer: Any) -> int:
    """The first token of the decoder's input: the one that the checkpoint states, else the padding token for T5, else
    end-of-text.

    Raises:
        DataError: the checkpoint states none, and the tokenizer has no end-of-text token.
    """
    for values in (config, read_object(folder / "generation_config.json")):
        if isinstance(start := values.get("decoder_start_token_id"), int):
            return start
    pad = tokenizer.pad_token_id if has_sentinels(tokenizer) else None
    return end_of_text(tokenizer) if pad is None else int(pad)


def starts_with_last(config: Config) -> bool:
    """Whether the decoder's input begins with the last token of its target instead."""
    return record_of(config).decoder_starts_with_last
