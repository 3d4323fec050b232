"""Conversations against the chat template itself: their tokens, and where they end."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gqa_convert.data.hub import HubDataset
from gqa_convert.errors import DataError
from tests.helpers.calibrations import calibration_batches
from tests.helpers.chats import (
    CHATS,
    LENGTH,
    PLAIN,
    TEXTS,
    rendered,
    rows_file,
    said,
    tokenizer_with,
)
from tests.helpers.data_helpers import evaluation_blocks
from tests.helpers.uptrain_runs import DEMO

STRICT = (
    "{% if messages[0]['role'] != 'user' %}{{ raise_exception('the user speaks first') }}{% "
    "endif %}"
) + PLAIN


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    return rows_file(tmp_path, [{"messages": chat} for chat in CHATS])


def packed(source: Any, tokenizer: Any, cache: Path) -> dict[str, np.ndarray[Any, Any]]:
    """All blocks of a source, in the order of the text."""
    blocks = evaluation_blocks(
        [source], tokenizer, objective="causal", sequence_length=LENGTH, tokens=10**6, cache=cache
    )
    return blocks.batch(range(len(blocks)))


def test_tokens_are_those_of_the_template_and_all_are_learned(chats: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_with(PLAIN)
    ids = rendered(tokenizer)
    batch = packed({"source": str(chats), "format": "chat"}, tokenizer, tmp_path / "cache")
    count = len(ids) - 1
    np.testing.assert_array_equal(batch["input_ids"].flatten()[:count], ids[:-1])
    np.testing.assert_array_equal(batch["labels"].flatten()[:count], ids[1:])


def test_other_forms_of_rows_give_the_same_samples(
    chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of Parquet files, which fill in nulls; a stream; and detection."""
    monkeypatch.setattr("gqa_convert.data.sources.commit_of", lambda *_: "0" * 40)
    monkeypatch.setattr(HubDataset, "open_rows", lambda _: [{"messages": chat} for chat in CHATS])
    filled = [{"messages": [message | {"name": None} for message in chat]} for chat in CHATS]
    pq.write_table(pa.Table.from_pylist(filled), tmp_path / "chats.parquet")
    tokenizer = tokenizer_with(PLAIN)
    expected = packed({"source": str(chats), "format": "chat"}, tokenizer, tmp_path / "cache")
    for source in (
        str(chats),
        str(tmp_path / "chats.parquet"),
        {"source": "org/some", "format": "chat"},
    ):
        found = packed(source, tokenizer, tmp_path / "cache")
        assert all((found[name] == expected[name]).all() for name in expected)


def test_calibration_renders_conversations(chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "gqa_convert.data.model_tokenizer.load_tokenizer", lambda _: tokenizer_with(PLAIN)
    )
    ids = rendered(tokenizer_with(PLAIN))
    found = calibration_batches(DEMO, str(chats), 10**6, seed=0, sequence_length=LENGTH)
    blocks = sorted(tuple(row) for batch in found.batches for row in batch["input_ids"].tolist())
    cut = [tuple(ids[at : at + LENGTH]) for at in range(0, len(ids), LENGTH)]
    assert blocks == sorted(block for block in cut if len(block) > 1)


@pytest.mark.parametrize(
    ("template", "rows", "message"),
    [
        (None, [{"messages": CHATS[0]}], "no chat template"),
        (
            STRICT,
            [{"messages": said(*TEXTS[:2])[::-1]}],
            "line 1: the chat template refuses.*user speaks first",
        ),
        (PLAIN, [{"messages": CHATS[0]}, {"text": "x"}], "line 2 has no 'messages', found text"),
        (PLAIN, [{"messages": "hello"}], "line 1: 'messages' holds a str"),
        (PLAIN, [{"messages": ["hello"]}], "message 1 is a str"),
        (PLAIN, [{"messages": [{"content": "x"}]}], "message 1 has no `role`, found content"),
        (PLAIN, [{"messages": [{"role": "user"}]}], "message 1 has no `content`, found role"),
        (PLAIN, [{"messages": []}], "holds no text"),
    ],
)
def test_conversations_that_cannot_be_used(
    template: str | None, rows: list[Any], message: str, tmp_path: Path
) -> None:
    path = rows_file(tmp_path, rows)
    with pytest.raises(DataError, match=message) as refused:
        packed(
            {"source": str(path), "format": "chat"}, tokenizer_with(template), tmp_path / "cache"
        )
    assert "\n" not in str(refused.value)
