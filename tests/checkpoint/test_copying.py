"""Files written from front to back: the same bytes whether the disk takes them from pages, blocks are shared or neither."""

import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gqa_convert.checkpoint import copying
from gqa_convert.checkpoint.copying import BLOCK, SourceFile, WrittenFile
from gqa_convert.errors import CorruptCheckpointError

DATA = np.random.default_rng(0).bytes(40 * BLOCK + 77)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SourceFile]:
    """A file of a few blocks, which make several requests."""
    monkeypatch.setattr(copying, "LARGE", 1)
    monkeypatch.setattr(copying, "_SMALL", 2 * BLOCK)
    monkeypatch.setattr(copying, "_STEP", 3 * BLOCK)
    (tmp_path / "in").write_bytes(DATA)
    with SourceFile(tmp_path / "in") as file:
        yield file


def clone(fd: int, request: int, asked: bytes) -> None:
    """What a filesystem does that shares blocks, by copying them."""
    assert request == copying._FICLONERANGE
    source, start, nbytes, at = struct.unpack("=qQQQ", asked)
    assert start % BLOCK == nbytes % BLOCK == at % BLOCK == 0
    os.pwrite(fd, os.pread(source, nbytes, start), at)


@pytest.mark.parametrize("answer", ["direct", "cached", "refused", "cut", "shared", "unfetched"])
def test_ranges_of_every_size_and_place(
    source: SourceFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    whole, calls = os.pwrite, []

    def pwrite(fd: int, view: memoryview, at: int) -> int:
        direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        calls.append((direct, at, len(view)))
        if direct and answer == "refused" and len(calls) > 2:
            raise OSError(errno.EINVAL, "not aligned")
        return whole(fd, view[: BLOCK if answer == "cut" and len(view) > BLOCK else None], at)

    if answer == "shared":
        monkeypatch.setattr(copying.fcntl, "ioctl", clone)
    else:
        monkeypatch.setattr(os, "pwrite", pwrite)
    fetched: list[tuple[int, int]] = []

    def sendfile(_: int, __: int, start: int, nbytes: int) -> int:
        fetched.append((start, nbytes))
        if answer == "unfetched":
            raise OSError(errno.EINVAL, "not to this file")
        return (nbytes + 1) // 2

    monkeypatch.setattr(os, "sendfile", sendfile)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    expected, seen = b"", []
    with WrittenFile(tmp_path / "out", 0 if answer == "cached" else 10**6, seen.append) as out:
        for start in (0, 8, BLOCK - 1, BLOCK, 3 * BLOCK + 8):
            for nbytes in (0, 1, BLOCK - 1, BLOCK, 2 * BLOCK, 2 * BLOCK + 1, 11 * BLOCK + 9):
                out.copy(source, start, nbytes)
                out.write(b"xyz")
                expected += DATA[start : start + nbytes] + b"xyz"
                start_of_next = len(expected) % BLOCK  # so that whole blocks follow one another
                out.copy(source, start_of_next, 7 * BLOCK)
                expected += DATA[start_of_next : start_of_next + 7 * BLOCK]
        assert not synced
    assert (tmp_path / "out").read_bytes()[: len(expected)] == expected
    assert sum(seen) == len(expected)
    assert len(synced) == 1, "everything is on the disk at the end"
    if answer != "shared":
        assert {BLOCK, 4 * BLOCK} <= {start for start, _ in fetched}, "requests follow one another"
        assert all(start >= 0 and nbytes > 0 and start + nbytes <= len(DATA) for start, nbytes in fetched)
        assert any(nbytes > copying._SMALL for _, _, nbytes in calls), "nothing came from the source's pages"
        direct = [(at, nbytes) for direct, at, nbytes in calls if direct]
        assert all(at % BLOCK == nbytes % BLOCK == 0 for at, nbytes in direct)
        assert answer != "cached" or not direct


def test_a_source_that_ends_too_early(source: SourceFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(CorruptCheckpointError, match="shorter"),
        WrittenFile(tmp_path / "out", 2 * len(DATA), lambda _: None) as out,
    ):
        out.copy(source, BLOCK, len(DATA))
    status, pages = os.fstat(source.fd), mmap.mmap(source.fd, 0, prot=mmap.PROT_READ)
    monkeypatch.setattr(os, "fstat", lambda _: status)
    os.truncate(tmp_path / "in", 8 * BLOCK)
    with (
        pytest.raises(CorruptCheckpointError, match="shorter"),
        WrittenFile(tmp_path / "before", len(DATA), lambda _: None) as out,
    ):
        out.copy(source, 0, len(DATA))
    monkeypatch.setattr(copying.mmap, "mmap", lambda *_, **__: pages)
    with (
        pytest.raises(CorruptCheckpointError, match="shorter"),
        WrittenFile(tmp_path / "meanwhile", len(DATA), lambda _: None) as out,
    ):
        out.copy(source, 0, len(DATA))


def test_a_source_that_cannot_be_read(source: SourceFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the source, not the result."""

    def fails(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fails)
    with (
        pytest.raises(CorruptCheckpointError, match=r"in cannot be read \(Input/output error\): check the disk"),
        WrittenFile(tmp_path / "out", len(DATA), lambda _: None) as out,
    ):
        out.copy(source, 0, 8)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails(source: SourceFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fails(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", fails)
    with (
        pytest.raises(OSError, match=os.strerror(code)),
        WrittenFile(tmp_path / "out", len(DATA), lambda _: None) as out,
    ):
        out.copy(source, 0, 12 * BLOCK)
