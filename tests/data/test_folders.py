"""Folders of data as people have them: which files are read, and that those which are not are
named.
"""

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gqa_convert.data.encoders import text_encoder
from gqa_convert.data.sources import as_source, open_source
from gqa_convert.data.speech import list_audio_files
from gqa_convert.errors import DataError
from tests.helpers.data_helpers import EOS, span_tokenizer, tokenize_into

TOKENIZER = span_tokenizer()


def rows(*numbers: int) -> list[dict[str, str]]:
    return [{"text": f"w{number}"} for number in numbers]


def lines(*numbers: int) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows(*numbers))


def put(folder: Path, name: str, content: str | bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def numbers_of(source: Any, cache: Path) -> list[int]:
    """The numbers of the words w0, w1, ... that are read, in order."""
    stated = as_source(source)
    text = open_source(stated)
    encoder = text_encoder(stated, text, TOKENIZER, closed=True, chats=False)
    tokens = tokenize_into(cache, text, encoder)
    return [token - 3 for token in tokens.read(0, tokens.size).tolist() if token != EOS]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_hidden_files_and_cards_are_no_text_and_are_named(
    folder: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(folder, "a.txt", "w1")
    put(folder, "below/b.md", "w2")
    for name in (
        "._a.txt",
        ".ipynb_checkpoints/a-checkpoint.txt",
        ".git/HEAD",
        "below/.hidden/b.txt",
    ):
        put(folder, name, b"w9 \xff")
    for name in ("README.md", "dataset_info.json", "state.json", "below/README.md"):
        put(folder, name, "w9")
    put(folder, "image.png", "w9")
    put(folder, "table.csv", "w9")
    assert numbers_of(str(folder), cache) == [1, 2]
    (note,) = {record.getMessage() for record in caplog.records}
    assert note.startswith(f"note: not read in {folder}: ")
    for words in (
        "._a.txt, .git/HEAD, .ipynb_checkpoints/a-checkpoint.txt and 1 more (hidden)",
        "README.md, below/README.md, dataset_info.json and 1 more (about data, no data)",
        "image.png, table.csv (no .txt",
    ):
        assert words in note
    assert "\n" not in note


def test_nothing_is_said_where_everything_is_read(
    folder: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(folder, "a.txt", "w1")
    assert numbers_of(str(folder), cache) == [1]
    assert numbers_of(str(folder / "*.txt"), cache) == [1]
    assert not caplog.records


def test_a_note_is_given_once_and_by_one_process(
    folder: Path, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, "a.txt", "w1")
    put(folder, "b.csv", "w2")
    monkeypatch.setenv("RANK", "1")
    numbers_of(str(folder), cache)
    assert not caplog.records
    monkeypatch.setenv("RANK", "0")
    for _ in range(3):
        numbers_of(str(folder), cache)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_patterns_pass_over_cards_too_unless_they_name_one(
    folder: Path, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, "a.md", "w1")
    put(folder, "README.md", "w2")
    put(folder, ".b.md", "w3")
    assert numbers_of(str(folder / "*.md"), cache) == [1]
    assert "README.md (about data, no data)" in caplog.text
    monkeypatch.chdir(folder.parent)
    assert numbers_of("data/*.md", cache) == numbers_of("data", cache) == [1]
    assert numbers_of(str(folder / "README.md"), cache) == [2]


@pytest.mark.parametrize("suffix", ["jsonl.gz", "txt.gz", "parquet", "arrow"])
def test_every_form_that_is_read(folder: Path, cache: Path, suffix: str) -> None:
    put(folder, "README.md", "w9")
    path = folder / "data" / f"part-0.{suffix}"
    path.parent.mkdir()
    table = pa.Table.from_pylist([row | {"id": 1} for row in rows(1, 2)])
    if suffix == "parquet":
        pq.write_table(table, path)
    elif suffix == "arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=1)
    else:
        path.write_bytes(gzip.compress((lines(1, 2) if "json" in suffix else "w1 w2").encode()))
    assert numbers_of(str(folder), cache) == [1, 2]
    assert numbers_of(str(path), cache) == [1, 2]


def test_what_datasets_has_saved_is_read_as_datasets_reads_it(folder: Path, cache: Path) -> None:
    saved = datasets.Dataset.from_list(rows(*range(40)))
    saved.save_to_disk(str(folder / "one"), num_shards=3)
    put(folder, "one/cache-0123456789abcdef.arrow", b"what map has made of it")
    assert numbers_of(str(folder / "one"), cache) == list(range(40))
    splits = datasets.DatasetDict(
        {"train": saved.select(range(3)), "test": saved.select(range(3, 5))}
    )
    splits.save_to_disk(str(folder / "two"))
    assert numbers_of(str(folder / "two"), cache) == [0, 1, 2]
    assert numbers_of({"source": str(folder / "two"), "split": "test"}, cache) == [3, 4]
    datasets.DatasetDict({"train_sft": splits["train"], "train_gen": splits["test"]}).save_to_disk(
        str(folder / "three")
    )
    assert numbers_of({"source": str(folder / "three"), "split": "train_gen"}, cache) == [3, 4]
    with pytest.raises(
        DataError, match="has no split train, found train_gen, train_sft: name its files"
    ):
        numbers_of(str(folder / "three"), cache)


SPLITS = {
    "files": {"train.jsonl": 1, "test.jsonl": 2, "more.jsonl": 3},
    "numbered files": {"train_0.jsonl": 1, "dev_0.jsonl": 2, "test_0.jsonl": 3},
    "folders": {"train/a.jsonl": 1, "test/train.jsonl": 2, "validation/a.jsonl": 3},
    "folders of texts": {"my-train/a.txt": 1, "my-test/a.txt": 2},
    "shards": {"data/train-00000-of-00001.jsonl": 1, "data/extra_1-00000-of-00001.jsonl": 2},
}


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("split", ["train", "test"])
def test_splits_are_those_of_datasets(folder: Path, cache: Path, name: str, split: str) -> None:
    for file, number in SPLITS[name].items():
        put(folder, file, lines(number) if file.endswith("jsonl") else f"w{number}")
    kind = "text" if "texts" in name else "json"
    loaded = datasets.load_dataset(kind, data_dir=str(folder), cache_dir=str(cache / "hub"))
    source = {"source": str(folder), "split": split}
    if split not in loaded:
        with pytest.raises(
            DataError, match="has no split test, found extra_1, train: name its files"
        ):
            numbers_of(source, cache)
        return
    assert numbers_of(source, cache) == [int(row["text"][1:]) for row in loaded[split]]


def test_files_of_other_splits_are_named(
    folder: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file, number in SPLITS["files"].items():
        put(folder, file, lines(number))
    assert numbers_of(str(folder), cache) == [1]
    assert "more.jsonl, test.jsonl (not in the split train)" in caplog.text


@pytest.mark.parametrize(
    "names",
    [["dev-diary.txt", "novel.txt"], ["train.py", "model.py", "test_model.py"], ["test.txt"]],
)
def test_one_split_alone_is_only_a_name(folder: Path, cache: Path, names: list[str]) -> None:
    for number, name in enumerate(sorted(names)):
        put(folder, name, f"w{number}")
    assert numbers_of(str(folder), cache) == list(range(len(names)))


def test_folders_with_signs_of_patterns_in_their_names(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "my [1] data*"
    for file, number in SPLITS["files"].items():
        put(folder, file, lines(number))
    assert numbers_of(str(folder), cache) == [1]


BAD = {
    "truncated": ("a.jsonl.gz", gzip.compress(lines(*range(200)).encode())[:90], "can't be read"),
    "not compressed": ("a.txt.gz", b"w1", "can't be read"),
    "no Arrow": ("a.arrow", b"w1", "is not a readable Arrow file"),
    "UTF-16": ("a.txt", "w1 w2 w3\n".encode("utf-16"), "is UTF-16 or no text"),
    "UTF-16 without a mark": (
        "a.txt",
        "“w1 w2 w3 w4”\n".encode("utf-16-le"),
        "is UTF-16 or no text",
    ),
    "UTF-16, high byte first": (
        "a.txt.gz",
        gzip.compress("w1 w2 w3\n".encode("utf-16-be")),
        "is UTF-16 or no text",
    ),
    "JSON lines in UTF-16": ("a.jsonl", lines(1).encode("utf-16-le"), "is UTF-16 or no text"),
    "Cyrillic in UTF-16": (
        "a.txt",
        "река течет мимо старых камней и зеленых холмов\n".encode("utf-16-le"),
        "is UTF-16",
    ),
    "UTF-32": ("a.txt", "w1 w2 w3\n".encode("utf-32-le"), "is UTF-16 or no text"),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_cannot_be_read(folder: Path, cache: Path, name: str) -> None:
    file, content, message = BAD[name]
    put(folder, file, content)
    with pytest.raises(DataError, match=message) as refused:
        numbers_of(str(folder), cache)
    assert "\n" not in str(refused.value)
    assert file in str(refused.value)


def test_a_lone_null_is_text(folder: Path, cache: Path) -> None:
    put(folder, "a.txt", "w1 \0 w3")
    assert numbers_of(str(folder), cache)[-1] == 3


def put_sounds(folder: Path, *names: str) -> None:
    for name in names:
        put(folder, name, b"sound")


def described(*names: str) -> str:
    return "".join(json.dumps({"file_name": name, "text": f"says {name}"}) + "\n" for name in names)


def csv_of(*names: str) -> str:
    return "\ufefffile_name,text\r\n" + "".join(f'{name},"says {name}"\r\n' for name in names)


def heard(folder: Path, split: str = "train") -> dict[str, str | None]:
    return {
        file.path.relative_to(folder).as_posix(): file.text
        for file in list_audio_files(folder, split)
    }


@pytest.mark.parametrize(
    "name", ["metadata.csv", "metadata.jsonl", "metadata.parquet", "train/metadata.jsonl"]
)
def test_texts_of_sound_in_every_form(
    folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    above = f"{Path(name).parent}/" if "/" in name else ""
    put_sounds(folder, f"{above}b.wav", f"{above}sub/a.WAV")
    names = ("sub/a.WAV", "b.wav")
    put(folder, name, csv_of(*names) if "csv" in name else described(*names))
    if "parquet" in name:
        pq.write_table(
            pa.Table.from_pylist([json.loads(line) for line in described(*names).splitlines()]),
            folder / name,
        )
    found = heard(folder)
    assert [*found.items()] == [
        (f"{above}sub/a.WAV", "says sub/a.WAV"),
        (f"{above}b.wav", "says b.wav"),
    ]
    assert not caplog.records


def test_sound_of_one_split_is_read(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for split in ("train", "test"):
        put_sounds(folder, f"{split}/1.wav")
        put(folder, f"{split}/metadata.csv", csv_of("1.wav"))
    put_sounds(folder, ".trash/1.wav")
    assert heard(folder) == {"train/1.wav": "says 1.wav"}
    assert "test/1.wav, test/metadata.csv (not in the split train)" in caplog.text
    assert ".trash/1.wav (hidden)" in caplog.text
    assert heard(folder, "test") == {"test/1.wav": "says 1.wav"}


def test_one_file_may_describe_all_splits(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    put_sounds(folder, "train_1.wav", "test_1.wav")
    put(folder, "metadata.csv", csv_of("test_1.wav", "train_1.wav"))
    assert heard(folder) == {"train_1.wav": "says train_1.wav"}
    assert "test_1.wav (not in the split train)" in caplog.text


def test_texts_that_are_not_used_are_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    put_sounds(folder, "1.wav", "2.wav", "test_1.wav")
    put(folder, "transcripts.tsv", "file\ttext")
    put(folder, "1.txt", "one")
    put(folder, "metadata.csv", csv_of("1.wav"))
    put(folder, "metadata.jsonl", described("1.wav"))
    with pytest.raises(DataError, match=r"names 1\.wav, which a row before it names"):
        heard(folder)
    assert "1.txt, transcripts.tsv (no .wav" in caplog.text
    (folder / "metadata.jsonl").unlink()
    assert heard(folder) == {"1.wav": "says 1.wav"}
    assert f"{folder / '2.wav'}, {folder / 'test_1.wav'} (not in the metadata)" in caplog.text
