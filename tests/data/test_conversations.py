"""Conversations from files, folders and the Hub, wherever text is read."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gqa_convert.data.hub import HubDataset
from gqa_convert.data.sources import as_source
from gqa_convert.errors import DataError
from gqa_convert.measuring.evaluation.examples import read_documents, text_material
from tests.helpers.calibrations import calibration_batches
from tests.helpers.chats import CHATS, LENGTH, PLAIN, rendered, rows_file, tokenizer_with
from tests.helpers.data_helpers import open_samples
from tests.helpers.uptrain_runs import DEMO


@pytest.fixture(
    params=["file", "folder", "folder with an empty file", "folder with a text before it", "Hub"]
)
def source(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The conversations, in the places where people have them."""
    rows = [{"messages": chat} for chat in CHATS]
    if request.param == "Hub":
        monkeypatch.setattr("gqa_convert.data.sources.commit_of", lambda *_: "0" * 40)
        monkeypatch.setattr(HubDataset, "open_rows", lambda _: rows)
        return "org/chats"
    folder = tmp_path / "chats"
    (folder / "data").mkdir(parents=True)
    if request.param == "file":
        return str(rows_file(folder, rows))
    (folder / "README.md").write_text("# Chats\n" * 100)
    if "empty" in request.param:
        (folder / "data" / "empty.jsonl").touch()
    pq.write_table(pa.Table.from_pylist(rows), folder / "data" / "train-00000-of-00001.parquet")
    if "text" in request.param:
        (folder / "about.txt").write_text("what is in here")
    return str(folder)


def none_of(*_: Any) -> None:
    """Shows no progress."""


def test_calibration_reads_them(
    source: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(
        "gqa_convert.data.model_tokenizer.load_tokenizer", lambda _: tokenizer_with(PLAIN)
    )
    if "text" in request.node.name:
        with pytest.raises(DataError, match=r"about\.txt is plain text, which has no fields"):
            calibration_batches(DEMO, source, 10**6, seed=0, sequence_length=LENGTH)
        return
    ids = rendered(tokenizer_with(PLAIN))
    found = calibration_batches(DEMO, source, 10**6, seed=0, sequence_length=LENGTH)
    blocks = sorted(tuple(row) for batch in found.batches for row in batch["input_ids"].tolist())
    cut = [tuple(ids[at : at + LENGTH]) for at in range(0, len(ids), LENGTH)]
    assert blocks == sorted(block for block in cut if len(block) > 1)


def test_evaluation_scores_them_as_the_template_writes_them(
    source: str, request: pytest.FixtureRequest
) -> None:
    tokenizer = tokenizer_with("{{ bos_token }}" + PLAIN)
    if "text" in request.node.name:
        with pytest.raises(DataError, match=r"about\.txt is plain text, which has no fields"):
            read_documents(as_source(source), tokenizer, None, none_of)
        return
    pieces = read_documents(as_source(source), tokenizer, None, none_of)
    material = text_material(pieces, tokenizer, window=512)
    found = sorted(
        [example.inputs["input_ids"][0], *example.targets.tolist()] for example in material.examples
    )
    ids = [tokenizer.apply_chat_template(chat, return_dict=False) for chat in CHATS]
    assert ids[0][0] == tokenizer.bos_token_id
    assert found == sorted(ids)
    few = read_documents(as_source(source), tokenizer, 10, none_of)
    assert [*text_material(few, tokenizer, window=512).examples[0].targets] == ids[0][1:10]


def test_advice_names_only_what_a_command_has(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for row in ({"content": "x"}, {"text": 5}, {"content": "x", "conversations": []}):
        path.write_text(json.dumps(row) + "\n")
        tokenizer = tokenizer_with(PLAIN)
        with pytest.raises(DataError) as of_convert:
            calibration_batches(DEMO, str(path), 10**6, seed=0)
        with pytest.raises(DataError) as of_evaluate:
            read_documents(as_source(str(path)), tokenizer, None, none_of)
        with pytest.raises(DataError) as of_recipes:
            open_samples(
                str(path),
                tokenizer,
                objective="causal",
                sequence_length=LENGTH,
                cache=tmp_path / "cache",
            )
        said = [str(each.value) for each in (of_convert, of_evaluate, of_recipes)]
        assert all(text.startswith(f"{path} line 1") and "rename" in text for text in said)
        assert [
            ("--text-field" in text, "`text_field`" in text, "format" in text) for text in said
        ] == [(False, False, False), (True, False, False), (False, True, True)]
        assert "recipe" not in said[0] + said[1]


def test_uptraining_reads_conversations_of_the_hub_where_the_recipe_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on finds its tokens without asking the Hub what a dataset holds."""
    monkeypatch.setattr("gqa_convert.data.sources.commit_of", lambda *_: "0" * 40)
    monkeypatch.setattr(HubDataset, "open_rows", lambda _: [{"messages": chat} for chat in CHATS])
    settings: Any = {"objective": "causal", "sequence_length": LENGTH, "cache": tmp_path / "cache"}
    with pytest.raises(DataError, match=r"has no 'text', found messages: .* `format: chat`"):
        open_samples("org/chats", tokenizer_with(PLAIN), **settings)
    source = {"source": "org/chats", "format": "chat"}
    first = open_samples([source], tokenizer_with(PLAIN), **settings)
    monkeypatch.setattr(HubDataset, "open_rows", lambda _: pytest.fail("the Hub is asked"))
    assert (
        open_samples([source], tokenizer_with(PLAIN), **settings).fingerprint == first.fingerprint
    )
