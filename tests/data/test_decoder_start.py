"""The first token of a decoder's input."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gqa_convert.data.model_tokenizer import decoder_start

T5: dict[str, int] = {"<extra_id_0>": 9}
OTHER: dict[str, int] = {}


@pytest.mark.parametrize(
    ("config", "generation", "sentinels", "expected"),
    [
        ({"decoder_start_token_id": 5, "bos_token_id": 2}, {}, OTHER, 5),
        ({"bos_token_id": 2}, {"decoder_start_token_id": 6}, OTHER, 6),
        ({"bos_token_id": 2}, {}, T5, 0),
        ({}, {"bos_token_id": 2}, OTHER, 2),  # T5Gemma, as transformers' generate
        ({}, {}, OTHER, 1),
    ],
)
def test_the_first_token_is_stated_or_that_of_the_kind(
    config: dict[str, Any],
    generation: dict[str, Any],
    sentinels: dict[str, int],
    expected: int,
    tmp_path: Path,
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = SimpleNamespace(
        get_vocab=lambda: sentinels, pad_token_id=0, eos_token_id=1, eos_token="</s>"
    )
    assert decoder_start(tmp_path, config, tokenizer) == expected
