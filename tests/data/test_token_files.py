"""Token files: found again by what determines them, the same by any number of processes, and
continued after a kill.
"""

import errno
import fcntl
import json
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from gqa_convert.data import files, token_files
from gqa_convert.data.encoders import TextEncoder
from gqa_convert.data.files import Fields, Files, Piece
from gqa_convert.data.samples import Samples
from gqa_convert.data.token_files import TokenSource
from gqa_convert.errors import DataError, NoSpaceError
from tests.helpers.data_helpers import (
    EOS,
    demo_tokenizer,
    open_samples,
    span_tokenizer,
    tokenize_into,
)

TOKENIZER = span_tokenizer()


def words(number: int, count: int = 40) -> str:
    return " ".join(f"w{(number * 7 + place * place) % 500}é" for place in range(count))


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """A long text, rows, an empty file and a short one."""
    texts = [words(number) for number in range(120)]
    rows = b"\r\n".join(json.dumps({"text": text}).encode() for text in texts)
    contents = {
        "long.txt": "\ufeff" + "\n".join(texts),
        "rows.jsonl": rows.decode(),
        "empty.txt": "",
        "short.txt": texts[7],
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content.encode())
    return [tmp_path / name for name in contents]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE", 700)
    monkeypatch.setattr(token_files, "_BATCH_PIECES", 20)


def made(
    paths: Sequence[Path], cache: Path, tokenizer: Any = TOKENIZER, **settings: Any
) -> TokenSource:
    encoder = TextEncoder(tokenizer, Fields(), closed=True)
    return tokenize_into(cache, Files("label", paths), encoder, **settings)


def ids(tokens: TokenSource) -> list[int]:
    found: list[int] = tokens.read(0, tokens.size).tolist()
    return found


@pytest.mark.parametrize("closed", [False, True])
def test_the_file_holds_the_tokens_of_the_documents(
    closed: bool, paths: list[Path], tmp_path: Path
) -> None:
    expected, ends = [], []
    for piece in Files("label", paths).pieces(Fields()):
        expected += TOKENIZER(piece.text)["input_ids"]
        if piece.last:
            expected += [EOS] * closed
            ends.append(len(expected))
    seen: list[tuple[str, int, int]] = []
    text, encoder = Files("label", paths), TextEncoder(TOKENIZER, Fields(), closed=closed)
    cache = tmp_path / "cache"
    found = tokenize_into(cache, text, encoder, progress=lambda *report: seen.append(report))
    assert ids(found) == expected
    assert found.ends.tolist() == ends
    assert found.complete
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1] == ("label", text.total_bytes, text.total_bytes)


def test_a_killed_process_continues(
    paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = made(paths, tmp_path / "whole")
    encode, calls = TextEncoder.encode, [0]

    def counted(self: TextEncoder, pieces: Sequence[Piece]) -> Any:
        calls[0] += 1
        if calls[0] == dies_at:
            os._exit(0)
        return encode(self, pieces)

    monkeypatch.setattr(TextEncoder, "encode", counted)
    dies_at = 0
    made(paths, tmp_path / "counted")
    batches, calls[0], dies_at = calls[0], 0, 7
    child = get_context("fork").Process(target=made, args=(paths, tmp_path / "cache"))
    child.start()
    child.join()
    (file,) = (tmp_path / "cache").glob("*.tokens")
    with file.open("ab") as handle:
        handle.write(b"half a batch that no record knows")
    calls[0], dies_at = 0, 0
    again = made(paths, tmp_path / "cache")
    assert calls[0] == batches - 6
    assert len(list((tmp_path / "cache").glob("*.tokens"))) == 1
    assert (ids(again), again.fingerprint) == (ids(whole), whole.fingerprint)


def test_tokens_are_those_of_their_text_and_tokenizer(tmp_path: Path) -> None:
    path, cache = tmp_path / "some.txt", tmp_path / "cache"
    path.write_text("w1 w2")
    assert ids(made([path], cache)) == ids(made([path], cache)) == [4, 5, EOS]
    assert len(list(cache.glob("*.tokens"))) == 1
    before = path.stat()
    path.write_text("w3 w4")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert ids(made([path], cache)) == [6, 7, EOS]
    other = span_tokenizer()
    other.add_tokens(["w3 w4"])
    assert ids(made([path], cache, other)) == [other.convert_tokens_to_ids("w3 w4"), EOS]
    demo = demo_tokenizer()
    assert demo.decode(ids(made([path], cache, demo))) == "w3 w4<|endoftext|>"
    demo(
        ["some text"], truncation=True, padding=True, max_length=1
    )  # leaves its mark on the tokenizer alone
    count = len(list(cache.glob("*.tokens")))
    assert made([path], cache, demo).size > 2
    assert len(list(cache.glob("*.tokens"))) == count


def test_machines_whose_locks_do_not_meet_make_the_same_tokens(
    paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One begins when the other has recorded a part; then both take a batch at a time."""
    expected = made(paths, tmp_path / "whole")
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    turns = threading.Barrier(2)
    found: list[TokenSource] = []

    def take_turns(*_: Any) -> None:
        with suppress(threading.BrokenBarrierError):
            turns.wait(20)

    def tokenise() -> None:
        found.append(made(paths, tmp_path / "cache", progress=take_turns))
        turns.abort()  # the other one goes on alone

    def begin(*_: Any) -> None:
        if not other.ident:
            other.start()
        take_turns()

    other = threading.Thread(target=tokenise)
    found.append(made(paths, tmp_path / "cache", progress=begin))
    turns.abort()
    other.join()
    found.append(made(paths, tmp_path / "cache"))
    assert len(found) == 3
    for tokens in found:
        assert (ids(tokens), tokens.fingerprint) == (ids(expected), expected.fingerprint)


def test_the_largest_id_is_known(paths: list[Path], tmp_path: Path) -> None:
    found = made(paths, tmp_path / "cache")
    assert made(paths, tmp_path / "cache").largest == found.largest == max(ids(found))


@pytest.mark.parametrize(
    "damage", ["other tokens", "truncated tokens", "no tokens", "no record", "broken record"]
)
def test_damaged_files_are_made_again(paths: list[Path], tmp_path: Path, damage: str) -> None:
    expected = made(paths, tmp_path / "cache")
    (tokens,), (record,) = (
        (tmp_path / "cache").glob("*.tokens"),
        (tmp_path / "cache").glob("*.json"),
    )
    if damage == "truncated tokens":
        content = tokens.read_bytes()
        tokens.unlink()  # the file before it stays mapped
        tokens.write_bytes(content[:-1])
    elif damage == "other tokens":  # as two that write into one file leave them
        content = tokens.read_bytes()
        tokens.unlink()
        tokens.write_bytes(content[:400] + content[:-400])
    elif damage == "broken record":
        record.write_text("{")
    else:
        (tokens if damage == "no tokens" else record).unlink()
    again = made(paths, tmp_path / "cache")
    assert (ids(again), again.fingerprint) == (ids(expected), expected.fingerprint)


def test_caches_that_cannot_be_used(
    paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(code: int) -> Any:
        def call(*_: Any) -> None:
            raise OSError(code, os.strerror(code))

        return call

    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="can't be used"):
        made(paths, tmp_path / "file" / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(token_files.os, "fsync", fails(errno.ENOSPC))
        with pytest.raises(NoSpaceError, match=r"the disk or quota of .* is full: make room"):
            made(paths, tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", fails(errno.ENOLCK))  # a file system without locks
        assert ids(made(paths, tmp_path / "cache")) == ids(made(paths, tmp_path / "other"))


def opened(path: Path, cache: Path, **settings: Any) -> Samples:
    return open_samples(
        str(path),
        span_tokenizer(),
        objective="causal",
        sequence_length=16,
        seed=3,
        cache=cache,
        **settings,
    )


def build(said: Connection, path: Path, cache: Path) -> None:
    """Open samples; say "tokenised" at every step of the work, which is slow, and at the end
    which samples they are.
    """

    def progress(*_: Any) -> None:
        said.send("tokenised")
        time.sleep(0.5)

    samples = opened(path, cache, progress=progress)
    said.send(f"{samples.fingerprint} {samples.batch([5])['input_ids'].tolist()}")
    said.close()


@pytest.mark.slow
def test_of_two_at_once_one_tokenises(tmp_path: Path) -> None:
    path, cache = tmp_path / "some.jsonl", tmp_path / "cache"
    path.write_text("".join(json.dumps({"text": words(number)}) + "\n" for number in range(60)))
    context, said = get_context("fork"), list[list[str]]()
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [context.Process(target=build, args=(pipe, path, cache)) for _, pipe in pipes]
    for process in processes:
        process.start()
    for process, (heard, _) in zip(processes, pipes, strict=True):
        process.join(120)
        lines = []
        while heard.poll():
            lines.append(heard.recv())
        said.append(lines)
    assert said[0][-1] == said[1][-1]
    assert sorted(len(lines) for lines in said) == [
        1,
        1 + 4,
    ]  # one of them has tokenised the batches, and the end
