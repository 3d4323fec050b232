"""Files written past the page cache: the same bytes as by plain writing, whatever fails; and reading ahead of time."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gqa_convert.checkpoint import direct_writing, early_reading
from gqa_convert.checkpoint.copying import SourceFile
from gqa_convert.checkpoint.direct_writing import DirectOutputFile, new_output_file
from gqa_convert.checkpoint.early_reading import read_early
from gqa_convert.checkpoint.shared_blocks import BLOCK
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import CorruptCheckpointError
from tests.helpers.checkpoints import same_weights, write_llama

DATA = np.random.default_rng(0).bytes(40 * BLOCK + 77)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file counts as large, and a few blocks make several requests."""
    monkeypatch.setattr(direct_writing, "_SMALLEST", 1)
    monkeypatch.setattr(direct_writing, "_BUFFER", 2 * BLOCK)
    monkeypatch.setattr(direct_writing, "_STEP", 3 * BLOCK)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[SourceFile]:
    (tmp_path / "in").write_bytes(DATA)
    file = SourceFile(tmp_path / "in")
    yield file
    file.close()


def opened(path: Path, size: int, progress: list[int]) -> DirectOutputFile:
    out = new_output_file(path, size, progress.append)
    if not isinstance(out, DirectOutputFile):  # a filesystem without O_DIRECT: the same code, through the page cache
        assert out.reserved
        out = DirectOutputFile(out.fd, os.open(path, os.O_WRONLY), progress.append)
    return out


def pieces() -> list[tuple[int, int]]:
    """Starts and lengths: at the ends of blocks and within them, shorter than a buffer and longer than some steps."""
    lengths = (0, 1, BLOCK - 1, BLOCK, 2 * BLOCK, 2 * BLOCK + 1, 11 * BLOCK + 9)
    return [(start, nbytes) for start in (0, 8, BLOCK - 1, BLOCK, 3 * BLOCK + 8) for nbytes in lengths]


@pytest.mark.parametrize("answer", ["written", "refused", "cut"])
def test_ranges_of_every_size_and_place(
    source: SourceFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    whole, asked = os.pwritev, []

    def pwritev(fd: int, views: list[memoryview], at: int) -> int:
        asked.append((at, len(views[0])))
        if answer == "refused" and len(asked) > 2:
            raise OSError(errno.EINVAL, "not aligned")
        return whole(fd, [views[0][: BLOCK if len(views[0]) > BLOCK and answer == "cut" else None]], at)

    monkeypatch.setattr(os, "pwritev", pwritev)
    # a range ends where the next one's block begins, so that whole blocks go from page to disk; "xyz" ends that
    expected = b""
    for start, nbytes in pieces():
        expected += DATA[start : start + nbytes] + b"xyz" + DATA[(len(expected) + nbytes + 3) % BLOCK :][: 7 * BLOCK]
    seen: list[int] = []
    out = opened(tmp_path / "out", len(expected), seen)
    for start, nbytes in pieces():
        out.copy(source, start, nbytes)
        out.write(b"xyz")
        out.copy(source, out.at % BLOCK, 7 * BLOCK)
    out.close()
    assert (tmp_path / "out").read_bytes() == expected
    assert sum(seen) == len(expected)
    assert all(at % BLOCK == nbytes % BLOCK == 0 for at, nbytes in asked)
    assert any(nbytes > direct_writing._BUFFER for _, nbytes in asked), "nothing came from the source's pages"


def test_everything_is_synced_before_the_file_is_closed(
    source: SourceFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    for name in ("pwritev", "pwrite", "fsync"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, name=name, real=real: (real(*given), done.append(name))[0])
    out = opened(tmp_path / "out", len(DATA), [])
    out.copy(source, 0, len(DATA))
    out.close()
    assert done.count("fsync") == 1
    assert done[-1] == "fsync"
    assert {"pwrite", "pwritev"} <= set(done), "the last bytes fill no block"


def test_a_source_that_ends_too_early(source: SourceFile, tmp_path: Path) -> None:
    out = opened(tmp_path / "out", 2 * len(DATA), [])
    with pytest.raises(CorruptCheckpointError, match="shorter"):
        out.copy(source, BLOCK, len(DATA))
    source.pages()
    out.copy(source, 0, 3 * BLOCK)
    os.truncate(tmp_path / "in", 8 * BLOCK)
    with pytest.raises(CorruptCheckpointError, match="shorter"):
        out._write_mapped(source, 3 * BLOCK, 3 * BLOCK, 9 * BLOCK)  # what a thread does that meets the missing pages
    out.abandon()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails(source: SourceFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fails(_fd: int, _views: list[memoryview], _at: int) -> int:
        raise OSError(code, os.strerror(code))

    out = opened(tmp_path / "out", len(DATA), [])
    monkeypatch.setattr(os, "pwritev", fails)
    out.copy(source, 0, 12 * BLOCK)
    with pytest.raises(OSError, match=os.strerror(code)):
        out.close()
    for handle in (out._fd, out._direct):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(handle)


@pytest.mark.parametrize("groups", [3, 12])
def test_conversions_agree_with_plain_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: int) -> None:
    folder = write_llama(tmp_path / "source", shards=3)
    direct: list[DirectOutputFile] = []
    made = DirectOutputFile.__init__
    monkeypatch.setattr(DirectOutputFile, "__init__", lambda self, *given: (direct.append(self), made(self, *given))[1])
    convert_checkpoint(folder, tmp_path / "out", groups, method="mean")
    monkeypatch.setattr(direct_writing, "_SMALLEST", 1 << 40)
    convert_checkpoint(folder, tmp_path / "plain", groups, method="mean")
    assert same_weights(tmp_path / "out", tmp_path / "plain")
    assert len(direct) in (0, 3)  # none on a filesystem without O_DIRECT


def test_reading_early_reads_the_weights_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, up to a number of bytes for all of them together, and no other file."""
    for name, nbytes in (("model-2.safetensors", 32 * BLOCK), ("model-1.safetensors", 3 * BLOCK), ("other.txt", BLOCK)):
        (tmp_path / name).write_bytes(DATA[:nbytes])
    read: dict[str, int] = {}
    send = os.sendfile

    def sendfile(out: int, source: int, at: int, most: int) -> int:
        done = send(out, source, at, most)
        if done:
            name = Path(f"/proc/self/fd/{source}").readlink().name
            assert at == read.get(name, 0)
            read[name] = at + done
        return done

    monkeypatch.setattr(os, "sendfile", sendfile)
    monkeypatch.setattr(early_reading, "_STEP", 8 * BLOCK)
    for most, second in ((1 << 30, 32 * BLOCK), (13 * BLOCK, 10 * BLOCK)):
        monkeypatch.setattr(early_reading, "_BYTES", most)
        read.clear()
        reader = read_early(tmp_path, tmp_path / "out")
        assert reader is not None
        reader.join()
        assert list(read.items()) == [("model-1.safetensors", 3 * BLOCK), ("model-2.safetensors", second)]


def test_nothing_is_read_early_where_blocks_will_be_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result's filesystem is asked by a file without a name; where it cannot be asked, the source is read."""
    (tmp_path / "model.safetensors").write_bytes(DATA[: 2 * BLOCK])
    asked: list[tuple[str, int]] = []
    read: list[int] = []

    def shares(path: Path, scratch: int) -> bool:
        asked.append((path.name, os.fstat(scratch).st_nlink))
        return True

    monkeypatch.setattr(early_reading, "can_share_blocks", shares)
    monkeypatch.setattr(os, "sendfile", lambda out, source, at, most: read.append(at))
    for out, expected in ((tmp_path / "out", []), (tmp_path / "missing" / "out", [0])):
        reader = read_early(tmp_path, out)
        assert reader is not None
        reader.join()
        assert read == expected
    assert asked == [("model.safetensors", 0)]
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_reading_early_leaves_mistakes_to_others(tmp_path: Path) -> None:
    assert read_early(tmp_path / "missing", tmp_path / "out") is None
    assert read_early("org/name", "org/out") is None
    (tmp_path / "model.safetensors").mkdir()
    reader = read_early(tmp_path, tmp_path / "out")
    assert reader is not None
    reader.join()
