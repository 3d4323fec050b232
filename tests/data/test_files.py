"""Sources of text: what is read of them, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import processors

from gqa_convert.data import files
from gqa_convert.data.encoders import text_encoder
from gqa_convert.data.files import Fields, Files
from gqa_convert.data.sources import as_source, open_source
from gqa_convert.errors import DataError
from tests.helpers.data_helpers import EOS, open_samples, span_tokenizer, tokenize_into

TOKENIZER = span_tokenizer()
TEXTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8"]
IDS = [4, 5, 6, EOS, 7, EOS, 8, 9, 10, 11, EOS]


def tokens_of(
    source: Any, cache: Path, *, closed: bool = True, tokenizer: Any = TOKENIZER
) -> list[int]:
    stated = as_source(source)
    text = open_source(stated)
    encoder = text_encoder(stated, text, tokenizer, closed=closed, chats=False)
    tokens = tokenize_into(cache, text, encoder)
    found: list[int] = tokens.read(0, tokens.size).tolist()
    return found


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def json_lines(*texts: Any, field: str = "text") -> str:
    return "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts)


@pytest.mark.parametrize("kind", ["txt", "jsonl", "json", "parquet"])
def test_files_of_every_kind(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"some.{kind}"
    if kind == "parquet":
        pq.write_table(
            pa.Table.from_pylist([{"id": 1, "text": text} for text in (*TEXTS, "", None)]), path
        )
    else:
        path.write_text(TEXTS[0] if kind == "txt" else json_lines(*TEXTS, "", None))
    assert tokens_of(str(path), tmp_path / "cache") == (IDS[:4] if kind == "txt" else IDS)


def test_patterns_and_folders_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "texts" / "below").mkdir(parents=True)
    for number, name in enumerate(("b.txt", "a.txt", "below/c.md"), 1):
        written(tmp_path / "texts", name, f"w{number}")
    written(tmp_path / "texts", "image.png", b"\xff\xfe")
    cache = tmp_path / "cache"
    assert tokens_of(str(tmp_path / "texts" / "*.txt"), cache) == [5, EOS, 4, EOS]
    assert tokens_of(str(tmp_path / "texts"), cache) == [5, EOS, 4, EOS, 6, EOS]
    assert tokens_of(str(tmp_path / "texts" / "**" / "*.md"), cache) == [6, EOS]
    assert tokens_of({"source": str(tmp_path / "texts" / "**" / "*.md")}, cache, closed=False) == [
        6
    ]


def test_long_files_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(
        f"w{number % 400}\n" if number % 7 else f"w{number % 400} " for number in range(3000)
    )
    path = written(tmp_path, "long.txt", "\ufeff" + text)
    monkeypatch.setattr(files, "PIECE", 100)
    pieces = list(Files("long", [path]).pieces(Fields()))
    assert "".join(piece.text for piece in pieces) == text
    assert len(pieces) > 50
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert [piece.first for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert tokens_of(str(path), tmp_path / "cache") == [
        3 + number % 400 for number in range(3000)
    ] + [EOS]


def test_the_beginning_of_text_is_written_where_the_tokenizer_writes_it(tmp_path: Path) -> None:
    tokenizer = span_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.bos_token_id
    path = written(tmp_path, "some.jsonl", json_lines("w1 w2", "w3"))
    assert tokens_of(str(path), tmp_path, tokenizer=tokenizer) == [4, 5, EOS, 6, EOS]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    assert tokens_of(str(path), tmp_path, tokenizer=tokenizer) == [bos, 4, 5, EOS, bos, 6, EOS]


BAD: dict[str, tuple[str, str | bytes, str]] = {
    "not UTF-8": ("some.txt", b"w1 \xff\xfe", "is not UTF-8"),
    "JSON lines that are not UTF-8": ("some.jsonl", b'{"text": "\xe9"}', "is not UTF-8"),
    "no JSON": ("some.jsonl", '{"text": "w1"}\n{"text"', "line 2 is not JSON"),
    "no object": ("some.jsonl", '"w1"\n', "line 1 holds a str"),
    "an array": (
        "some.json",
        '[{"text": "w1"}]\n',
        "line 1 holds a list, expected one object per line",
    ),
    "an object over several lines": (
        "some.json",
        '{\n"text": "w1"\n}',
        "line 1 is not JSON.*one object per line",
    ),
    "no such field": (
        "some.jsonl",
        json_lines("w1", field="content"),
        r"line 1 has no 'text', found id, content.*text_field",
    ),
    "no text": ("some.jsonl", json_lines(5), "line 1: 'text' holds a int"),
    "empty": ("some.txt", "", "holds no text"),
    "empty rows": ("some.jsonl", json_lines("", None), "holds no text"),
    "no Parquet": ("some.parquet", b"w1", "is not a readable Parquet file"),
    "too short": ("some.txt", "w1 w2", "has 3 tokens, fewer than one sample of 5"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(tmp_path: Path, name: str) -> None:
    file, content, message = BAD[name]
    path = written(tmp_path, file, content)
    with pytest.raises(DataError, match=message):
        open_samples(
            str(path), TOKENIZER, objective="causal", sequence_length=4, cache=tmp_path / "cache"
        )
    assert (list((tmp_path / "cache").rglob("*.json")) != []) == (name == "too short")


def test_bad_sources(tmp_path: Path) -> None:
    for source, message in {
        str(tmp_path / "none.txt"): "does not exist",
        "none.jsonl": "does not exist",
        str(tmp_path / "*.txt"): "holds no text files",
        str(tmp_path): "holds no text files",
        "": "is empty",
        "what is this?": "holds no text files",
        "what is this": "does not exist",
    }.items():
        with pytest.raises(DataError, match=message):
            open_source(as_source(source))
    pq.write_table(pa.table({"content": ["w1"]}), tmp_path / "some.parquet")
    with pytest.raises(DataError, match=r"has no 'text', found content"):
        tokens_of(str(tmp_path / "some.parquet"), tmp_path)
    assert tokens_of(
        {"source": str(tmp_path / "some.parquet"), "text_field": "content"}, tmp_path
    ) == [4, EOS]
    with pytest.raises(
        DataError, match="the data source: wieght is an unknown key: did you mean 'weight'"
    ):
        as_source({"source": "some.txt", "wieght": 2})
    with pytest.raises(DataError, match="source is missing: add this key"):
        as_source({"weight": 2})
