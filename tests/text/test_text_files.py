"""Sources of text and token files: what is read, what is refused, and what survives."""

import dataclasses
import errno
import gzip
import json
import os
import signal
import time
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import processors

from gqa_convert.errors import DataError
from gqa_convert.text import stdlib_text, text_files, token_files
from gqa_convert.text.samples import open_samples
from gqa_convert.text.sources import Source, as_source, open_source
from gqa_convert.text.text_files import FileText
from gqa_convert.text.token_files import TokenFile, build_token_file, open_token_file
from gqa_convert.text.tokenizing import TextEncoder
from tests.helpers.data_helpers import EOS, demo_tokenizer, span_tokenizer

TOKENIZER = span_tokenizer()
TEXTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8"]
IDS = [4, 5, 6, EOS, 7, EOS, 8, 9, 10, 11, EOS]


def silent(label: str, done: int, total: int) -> None:
    pass


def tokens_of(source: Any, cache: Path, *, closed: bool = True, tokenizer: Any = TOKENIZER) -> TokenFile:
    text = open_source(as_source(source), cache)
    assert isinstance(text, FileText)
    found = open_token_file(build_token_file(text, TextEncoder(tokenizer, closed=closed), cache, silent))
    assert found is not None
    return found


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def json_lines(*texts: Any, field: str = "text") -> str:
    return "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts)


@pytest.mark.parametrize("kind", ["txt", "txt.gz", "txt.zst", "jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_files_of_every_kind(tmp_path: Path, kind: str) -> None:
    content = (TEXTS[0] if kind.startswith("txt") else json_lines(*TEXTS, "", None)).encode()
    path = tmp_path / f"some.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"text": [*TEXTS, "", None], "other": [1, 2, 3, 4, 5]}), path)
    elif kind.endswith("zst"):
        path.write_bytes(pa.compress(content, "zstd", asbytes=True))
    else:
        path.write_bytes(gzip.compress(content) if kind.endswith("gz") else content)
    found = tokens_of(str(path), tmp_path / "cache")
    expected = IDS[:4] if kind.startswith("txt") else IDS
    assert found.tokens.tolist() == expected
    assert found.tokens.dtype == np.uint16
    assert found.documents == (1 if kind.startswith("txt") else 3)


def test_patterns_and_folders_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "texts" / "below").mkdir(parents=True)
    for number, name in enumerate(("b.txt", "a.txt", "below/c.md"), 1):
        written(tmp_path / "texts", name, f"w{number}")
    written(tmp_path / "texts", "image.png", b"\xff\xfe")
    cache = tmp_path / "cache"
    assert tokens_of(str(tmp_path / "texts" / "*.txt"), cache).tokens.tolist() == [5, EOS, 4, EOS]
    assert tokens_of(str(tmp_path / "texts"), cache).tokens.tolist() == [5, EOS, 4, EOS, 6, EOS]
    assert tokens_of(str(tmp_path / "texts" / "**" / "*.md"), cache).tokens.tolist() == [6, EOS]
    assert tokens_of({"source": str(tmp_path / "texts" / "**" / "*.md")}, cache, closed=False).tokens.tolist() == [6]


def test_long_files_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"w{number % 400}\n" if number % 7 else f"w{number % 400} " for number in range(3000))
    path = written(tmp_path, "long.txt", "\ufeff" + text)
    monkeypatch.setattr(text_files, "PIECE", 100)
    pieces = list(FileText("long", [path], "text"))
    assert "".join(piece.text for piece in pieces) == text
    assert len(pieces) > 50
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert tokens_of(str(path), tmp_path / "cache").tokens.tolist() == [3 + number % 400 for number in range(3000)] + [
        EOS
    ]


def test_the_standard_library_is_there() -> None:
    train, held_out = (open_source(Source(name), Path()) for name in ("python-stdlib", "python-stdlib:held-out"))
    assert isinstance(train, FileText)
    assert isinstance(held_out, FileText)
    assert len(train.files) > 10 * len(held_out.files) > 0
    assert not set(train.files) & set(held_out.files)
    assert sum(len(piece.text) for piece in held_out) > 10**5


def test_the_standard_library_is_listed_in_order_without_what_is_installed_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a/b.py", "a/sub/c.py", "a-b.py", "a.py"]
    tests = ["a/sub/tests/e.py", "test/d.py"]
    for name in (*names, *tests, "site-packages/f.py", "a/__pycache__/g.py", "a/h.txt", "tests.txt/i"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        written(tmp_path, name, "x")
    monkeypatch.setattr(stdlib_text.sysconfig, "get_path", lambda _: str(tmp_path))

    def listed(**options: bool) -> list[str]:
        parts = [stdlib_text.source_files(held_out, **options) for held_out in (False, True)]
        assert all(stdlib_text.is_held_out(path.relative_to(tmp_path).as_posix()) for path in parts[1])
        assert all(part == sorted(part) for part in parts)
        return sorted(path.relative_to(tmp_path).as_posix() for part in parts for path in part)

    assert listed() == sorted(names)
    assert listed(with_tests=True) == sorted([*names, *tests])


def test_the_beginning_of_text_is_written_where_the_tokenizer_writes_it(tmp_path: Path) -> None:
    tokenizer = span_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.bos_token_id
    path = written(tmp_path, "some.jsonl", json_lines("w1 w2", "w3"))
    assert tokens_of(str(path), tmp_path, tokenizer=tokenizer).tokens.tolist() == [4, 5, EOS, 6, EOS]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    assert tokens_of(str(path), tmp_path, tokenizer=tokenizer).tokens.tolist() == [bos, 4, 5, EOS, bos, 6, EOS]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", ["some.json", "some.jsonl", "some.json.gz"])
def test_an_array_is_read_as_its_items(name: str, indent: int | None, tmp_path: Path) -> None:
    text = json.dumps([{"id": 1, "text": "w1 w2"}, {"text": ""}, {"text": "w3"}], indent=indent)
    path = written(tmp_path, name, gzip.compress(text.encode()) if name.endswith(".gz") else text)
    assert tokens_of(str(path), tmp_path).tokens.tolist() == [4, 5, EOS, 6, EOS]


def test_half_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    path = written(tmp_path, "some.jsonl", '{"text": "w1 \\ud800"}\n')
    assert tokens_of(str(path), tmp_path).tokens.tolist() == [4, TOKENIZER.unk_token_id, EOS]


BAD: dict[str, tuple[str, str | bytes, str]] = {
    "not UTF-8": ("some.txt", b"w1 \xff\xfe", "is not UTF-8"),
    "JSON lines that are not UTF-8": ("some.jsonl", b'{"text": "\xe9"}', "is not UTF-8"),
    "no JSON": ("some.jsonl", '{"text": "w1"}\n{"text"', "line 2 is not JSON"),
    "no object": ("some.jsonl", '"w1"\n', "line 1 holds a str"),
    "an array of texts": ("some.json", '["w1"]\n', "item 1 holds a str, expected an object with the field 'text'"),
    "an array that is cut off": ("some.json", '[{"text": "w1"},', "begins like a JSON array but is not one"),
    "several arrays": ("some.jsonl", '["w1"]\n["w2"]\n', "one array of objects, or one object per line"),
    "an object over several lines": (
        "some.json",
        '{\n"text": "w1"\n}',
        "line 1 is not JSON.*one object per line, or one array",
    ),
    "no such field": (
        "some.jsonl",
        json_lines("w1", field="content"),
        r"line 1 has no 'text', found id, content.*text_field",
    ),
    "no text": ("some.jsonl", json_lines(5), "line 1: 'text' holds a int"),
    "empty": ("some.txt", "", "holds no text"),
    "empty rows": ("some.jsonl", json_lines("", None), "holds no text"),
    "cut off": ("some.txt.gz", gzip.compress(b"w1 w2 " * 1000)[:40], "is damaged"),
    "no gzip": ("some.txt.gz", b"w1", "is damaged"),
    "no zstd": ("some.txt.zst", b"w1", "some.txt.zst"),
    "no Parquet": ("some.parquet", b"w1", "is not a readable Parquet file"),
    "too short": ("some.txt", "w1 w2", "has 3 tokens, fewer than one sample of 5"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(tmp_path: Path, name: str) -> None:
    file, content, message = BAD[name]
    path = written(tmp_path, file, content)
    waits: list[int] = []
    with pytest.raises(DataError, match=message):
        open_samples(
            str(path),
            TOKENIZER,
            objective="causal",
            sequence_length=4,
            cache=tmp_path / "cache",
            wait=lambda: waits.append(1),
        )
    assert waits == [1]
    assert not list((tmp_path / "cache").glob("*.part"))


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
            open_source(as_source(source), tmp_path)
    pq.write_table(pa.table({"content": ["w1"]}), tmp_path / "some.parquet")
    with pytest.raises(DataError, match=r"has no 'text', found content"):
        tokens_of(str(tmp_path / "some.parquet"), tmp_path)
    assert tokens_of({"source": str(tmp_path / "some.parquet"), "text_field": "content"}, tmp_path).tokens.tolist() == [
        4,
        EOS,
    ]
    with pytest.raises(DataError, match="the data source has an unknown key 'wieght': did you mean 'weight'"):
        as_source({"source": "some.txt", "wieght": 2})
    with pytest.raises(DataError, match="no key 'source'"):
        as_source({"weight": 2})
    with pytest.raises(DataError, match="at least one source"):
        open_samples([], TOKENIZER, objective="causal", sequence_length=4, cache=tmp_path)


@pytest.mark.parametrize("key", ["split", "name", "revision"])
@pytest.mark.parametrize("place", ["text.txt", ".", "*.txt", "python-stdlib"])
def test_local_text_has_no_keys_of_the_hub(tmp_path: Path, key: str, place: str) -> None:
    (tmp_path / "text.txt").write_text("some text")
    source = place if place == "python-stdlib" else str(tmp_path / place)
    open_source(as_source({"source": source, "split": "train"}), tmp_path)  # the default, which splits nothing off
    with pytest.raises(DataError, match=f"{key} = 'other' only applies to datasets on the Hub: remove {key}") as caught:
        open_source(as_source({"source": source, key: "other"}), tmp_path)
    assert str(caught.value).startswith(source)


def test_sources_as_mappings() -> None:
    given = Source(source="org/some", weight=2.0, text_field="content", split="train[:1%]", name="en", revision="v1")
    assert as_source(given) is given
    assert as_source(dataclasses.asdict(given)) == given
    assert as_source({"source": "org/some", "weight": 2}) == Source("org/some", 2)


def test_a_tokenizer_without_end_of_text(tmp_path: Path) -> None:
    path = written(tmp_path, "some.txt", "w1")
    with pytest.raises(DataError, match="no end-of-text token"):
        open_samples(str(path), span_tokenizer(eos=None), objective="causal", sequence_length=4, cache=tmp_path)


def test_tokens_are_those_of_their_text_and_tokenizer(tmp_path: Path) -> None:
    path, cache = written(tmp_path, "some.txt", "w1 w2"), tmp_path / "cache"
    assert tokens_of(str(path), cache).tokens.tolist() == [4, 5, EOS]
    assert len(list(cache.glob("*.tokens"))) == 1
    tokens_of(str(path), cache)
    assert len(list(cache.glob("*.tokens"))) == 1
    before = path.stat()
    written(tmp_path, "some.txt", "w3 w4")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert tokens_of(str(path), cache).tokens.tolist() == [6, 7, EOS]
    other = span_tokenizer()
    other.add_tokens(["w3 w4"])
    assert tokens_of(str(path), cache, tokenizer=other).tokens.tolist() == [other.convert_tokens_to_ids("w3 w4"), EOS]
    demo = demo_tokenizer()
    assert demo.decode(tokens_of(str(path), cache, tokenizer=demo).tokens.tolist()) == "w3 w4<|endoftext|>"
    demo(
        ["some text"], truncation=True, padding=True, max_length=1
    )  # leaves its mark on the tokenizer, and none on the tokens
    count = len(list(cache.glob("*.tokens")))
    assert len(tokens_of(str(path), cache, tokenizer=demo).tokens) > 2
    assert len(list(cache.glob("*.tokens"))) == count


def test_wide_vocabularies(tmp_path: Path) -> None:
    tokenizer = span_tokenizer()
    tokenizer.add_tokens([f"x{number}" for number in range(1 << 16)])
    found = tokens_of(str(written(tmp_path, "some.txt", f"w1 x{(1 << 16) - 1}")), tmp_path, tokenizer=tokenizer)
    assert found.tokens.dtype == np.uint32
    assert found.tokens.tolist() == [4, len(tokenizer) - 1, EOS]


@pytest.mark.parametrize("damage", ["truncated", "longer", "header", "empty", "no header"])
def test_damaged_token_files_are_made_again(tmp_path: Path, damage: str) -> None:
    path, cache = written(tmp_path, "some.txt", "w1 w2"), tmp_path / "cache"
    expected = tokens_of(str(path), cache).tokens.tolist()
    (file,) = cache.glob("*.tokens")
    good = file.read_bytes()
    bad = {
        "truncated": good[:-1],
        "longer": good + b"\0",
        "header": good[:60] + b"9" + good[61:],
        "empty": b"",
        "no header": bytes(len(good)),
    }[damage]
    file.write_bytes(bad)
    assert open_token_file(file) is None
    assert tokens_of(str(path), cache).tokens.tolist() == expected
    assert file.read_bytes() == good


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_compressed_file_with_changed_bytes(tmp_path: Path, suffix: str) -> None:
    plain = b"".join(b'{"text": "w%d"}\n' % (number % 7) for number in range(500))
    packed = bytearray(gzip.compress(plain, mtime=0) if suffix == "gz" else pa.compress(plain, "zstd", asbytes=True))
    packed[20:28] = b"\xff" * 8
    path = tmp_path / f"text.jsonl.{suffix}"
    path.write_bytes(packed)
    with pytest.raises(DataError, match=r"text\.jsonl\..* (is damaged|can't be read)"):
        tokens_of(str(path), tmp_path / "cache")


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = written(tmp_path, "some.txt", "w1 w2"), tmp_path / "cache"

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(token_files.os, "fsync", full)
        with pytest.raises(DataError, match=r"the disk or quota of the token cache .* is full: make room"):
            tokens_of(str(path), cache)
    assert not list(cache.glob("*.part"))
    assert tokens_of(str(path), cache).tokens.tolist() == [4, 5, EOS]


def test_a_cache_that_cannot_be_used(tmp_path: Path) -> None:
    path = written(tmp_path, "some.txt", "w1 w2")
    with pytest.raises(DataError, match="can't be used"):
        tokens_of(str(path), written(tmp_path, "file", "") / "cache")


def test_progress_comes_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl.gz"
    path.write_bytes(gzip.compress(json_lines(*[f"w{number % 400}" for number in range(5000)]).encode()))
    seen: list[tuple[str, int, int]] = []
    text = open_source(Source(str(path)), tmp_path)
    assert isinstance(text, FileText)
    build_token_file(text, TextEncoder(TOKENIZER, closed=True), tmp_path, lambda *report: seen.append(report))
    size = path.stat().st_size
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1] == (str(path), size, size)


def build(said: Connection, path: Path, cache: Path, pause: float) -> None:
    """Open samples; say "tokenised" at every step of the work, wait, and at the end say which samples they are."""

    def progress(*_: Any) -> None:
        said.send("tokenised")
        time.sleep(pause)

    samples = open_samples(
        str(path),
        span_tokenizer(),
        objective="causal",
        sequence_length=16,
        seed=3,
        cache=cache,
        progress=progress,
    )
    said.send(f"{samples.fingerprint} {samples.batch([5])['input_ids'].tolist()}")


def build_elsewhere(path: Path, cache: Path, pause: float) -> tuple[BaseProcess, Connection]:
    """`build` in a fork of this process, and what it says."""
    context = get_context("fork")
    heard, said = context.Pipe(duplex=False)
    process = context.Process(target=build, args=(said, path, cache, pause))
    process.start()
    said.close()
    return process, heard


def lines_of(heard: Connection) -> list[str]:
    """All that is said until the process ends."""
    lines: list[str] = []
    with suppress(EOFError):
        while heard.poll(120):
            lines.append(heard.recv())
    return lines


@pytest.mark.slow
def test_two_at_once_and_one_that_is_killed(tmp_path: Path) -> None:
    path = written(tmp_path, "some.jsonl", json_lines(*[f"w{number % 400} w{number % 7}" for number in range(3000)]))
    cache = tmp_path / "cache"
    killed, heard = build_elsewhere(path, cache, 60)
    assert heard.recv() == "tokenised"
    assert list(cache.glob("*.part"))
    killed.kill()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert list(cache.glob("*.part"))

    both = [build_elsewhere(path, cache, 0.5) for _ in range(2)]
    said = [lines_of(heard) for _, heard in both]
    for process, _ in both:
        process.join()
        assert process.exitcode == 0
    assert said[0][-1] == said[1][-1]
    assert sorted(len(lines) for lines in said) == [
        1,
        1 + 4,
    ]  # one of them has tokenised, in three batches and one part
    assert not list(cache.glob("*.part"))
    fresh = open_samples(
        str(path), span_tokenizer(), objective="causal", sequence_length=16, seed=3, cache=tmp_path / "other"
    )
    assert said[0][-1] == f"{fresh.fingerprint} {fresh.batch([5])['input_ids'].tolist()}"


def test_the_other_processes_wait_and_read(tmp_path: Path) -> None:
    path, cache = (
        written(tmp_path, "some.txt", " ".join(f"w{number % 400}" for number in range(300))),
        tmp_path / "cache",
    )
    settings: dict[str, Any] = {"objective": "causal", "sequence_length": 16, "seed": 3, "cache": cache}
    with pytest.raises(DataError, match="first process of this machine"):
        open_samples(str(path), TOKENIZER, is_local_main=False, **settings)
    assert not cache.exists()
    main: list[Any] = []
    other = open_samples(
        str(path),
        TOKENIZER,
        is_local_main=False,
        wait=lambda: main.append(open_samples(str(path), TOKENIZER, **settings)),
        **settings,
    )
    assert other.fingerprint == main[0].fingerprint
    assert (other.batch([7, 2])["input_ids"] == main[0].batch([7, 2])["input_ids"]).all()


def test_a_batch_is_quick(tmp_path: Path) -> None:
    """The bound is generous: what it would catch is work per token in Python."""
    rng = np.random.default_rng(0)
    path = written(tmp_path, "some.txt", " ".join(f"w{number}" for number in rng.integers(0, 500, 60000)))
    for objective, length in (("causal", 2048), ("span_corruption", 512)):
        samples = open_samples(
            str(path), span_tokenizer(200), objective=objective, sequence_length=length, cache=tmp_path
        )
        samples.batch(range(8))
        times = []
        for turn in range(20):
            before = time.perf_counter()
            samples.batch(range(8 * turn, 8 * turn + 8))
            times.append(time.perf_counter() - before)
        assert min(times) < 0.01
