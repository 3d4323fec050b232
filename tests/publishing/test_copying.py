"""Files written from front to back: the same bytes whether the disk takes them from pages, blocks
are shared or neither.
"""

import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gqa_convert.checkpoint.source_files import SourceFile
from gqa_convert.errors import CorruptCheckpointError
from gqa_convert.publishing import copying
from gqa_convert.publishing.copying import BLOCK, WrittenFile
from tests.helpers.checkpoints import refused

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


@pytest.mark.parametrize("answer", ["direct", "cached", "refused", "cut", "shared"])
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
    assert (tmp_path / "out").read_bytes() == expected
    assert sum(seen) == len(expected)
    assert len(synced) == 1, "everything is on the disk at the end"
    direct = [(at, nbytes) for direct, at, nbytes in calls if direct]
    assert all(at % BLOCK == nbytes % BLOCK == 0 for at, nbytes in direct)
    assert bool(direct) == (answer not in ("cached", "shared"))


def copied(source: SourceFile, out: Path, nbytes: int = len(DATA)) -> None:
    with WrittenFile(out, len(DATA), lambda _: None) as file:
        file.copy(source, 0, nbytes)


def test_a_source_that_ends_too_early(
    source: SourceFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is copied, after its size was read, and after its pages were mapped."""
    with refused(CorruptCheckpointError, "shorter"):
        copied(source, tmp_path / "before", 2 * len(DATA))
    pages = mmap.mmap(source.fileno(), 0, prot=mmap.PROT_READ)
    os.truncate(tmp_path / "in", 8 * BLOCK)
    with refused(CorruptCheckpointError, "shorter"):
        copied(source, tmp_path / "unmapped")
    monkeypatch.setattr(copying.mmap, "mmap", lambda *_, **__: pages)
    with refused(CorruptCheckpointError, "shorter"):
        copied(source, tmp_path / "mapped")


def fails(code: int) -> Callable[..., int]:
    def call(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    return call


def test_a_source_that_cannot_be_read(
    source: SourceFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the source, not the result."""
    monkeypatch.setattr(os, "preadv", fails(errno.EIO))
    with refused(CorruptCheckpointError, "in cannot be read (Input/output error): check the disk"):
        copied(source, tmp_path / "out", 8)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails(
    source: SourceFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(os, "pwrite", fails(code))
    with pytest.raises(OSError, match=os.strerror(code)):
        copied(source, tmp_path / "out", 12 * BLOCK)
