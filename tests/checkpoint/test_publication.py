"""OUT appears whole or not at all, whatever happens meanwhile."""

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gqa_convert.checkpoint import publication
from gqa_convert.checkpoint.publication import StagedFolder, check_destination, sweep
from gqa_convert.conversion import run as convert
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import (
    CorruptCheckpointError,
    GQAConvertError,
    InterruptedRunError,
    NoSpaceError,
    OutputError,
)
from tests.helpers.checkpoints import digests, llama_arrays, write_llama
from tests.helpers.command_line import run_python

ROOT = Path(__file__).parents[2]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "source", shards=3)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def refused(kind: type[GQAConvertError], *words: str, call: Callable[[], Any]) -> None:
    """Check that a call fails with one line that holds all the words."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert message.isprintable()
    for word in words:
        assert word in message


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if ".gqa-convert-" in path.name]


def complete(folder: Path, reference: dict[str, str]) -> bool:
    return digests(folder) == reference and (folder / "gqa_conversion.json").is_file()


class TestDestination:
    def test_an_existing_folder(self, source: Path, out: Path) -> None:
        convert_checkpoint(source, out, 4)
        before = digests(out, ignore=())
        refused(OutputError, "exists already", "--overwrite", call=lambda: convert_checkpoint(source, out, 3))
        assert digests(out, ignore=()) == before

    def test_overwrite_replaces_everything(self, source: Path, out: Path, tmp_path: Path) -> None:
        convert_checkpoint(source, tmp_path / "reference", 4)
        convert_checkpoint(source, out, 3, ConversionOptions(max_shard_size=20_000))
        convert_checkpoint(source, out, 4, ConversionOptions(overwrite=True))
        assert complete(out, digests(tmp_path / "reference"))
        assert leftovers(tmp_path) == []

    def test_overwrite_spares_what_is_no_checkpoint(self, source: Path, out: Path) -> None:
        out.mkdir()
        (out / "thesis.tex").write_text("x")
        refused(
            OutputError,
            "thesis.tex",
            call=lambda: convert_checkpoint(source, out, 4, ConversionOptions(overwrite=True)),
        )
        assert (out / "thesis.tex").read_text() == "x"

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_the_source_and_its_neighbourhood(self, source: Path, tmp_path: Path, overwrite: bool) -> None:
        before, options = digests(tmp_path), ConversionOptions(overwrite=overwrite)
        (tmp_path / "link").symlink_to(source)
        (tmp_path / "config.json").write_text("{}")
        for place, words in {
            source: "source itself",
            source / ".." / "source": "source itself",
            tmp_path / "link": "source itself",
            tmp_path / "link" / "sub": "inside the source",
            source / "a" / "b": "inside the source",
            tmp_path: "contains the source",
            Path("/"): "contains the source",
        }.items():
            refused(OutputError, words, call=lambda: convert_checkpoint(source, place, 4, options))  # noqa: B023
        (tmp_path / "config.json").unlink()
        (tmp_path / "link").unlink()
        assert digests(tmp_path) == before

    def test_a_source_that_links_into_out(self, source: Path, out: Path) -> None:
        shutil.copytree(source, out)
        for path in source.glob("*.safetensors"):
            path.unlink()
            path.symlink_to(out / path.name)
        refused(
            OutputError, "links to", call=lambda: convert_checkpoint(source, out, 4, ConversionOptions(overwrite=True))
        )

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_links_and_files(self, source: Path, out: Path, tmp_path: Path, overwrite: bool) -> None:
        (tmp_path / "elsewhere").mkdir()
        for target in ("elsewhere", "nowhere", "out"):
            out.symlink_to(target)
            refused(
                OutputError,
                "is a link",
                call=lambda: convert_checkpoint(source, out, 4, ConversionOptions(overwrite=overwrite)),
            )
            out.unlink()
        out.write_text("x")
        refused(
            OutputError,
            "is a file",
            call=lambda: convert_checkpoint(source, out, 4, ConversionOptions(overwrite=overwrite)),
        )
        refused(OutputError, "cannot be written", call=lambda: convert_checkpoint(source, out / "sub" / "sub", 4))
        assert out.read_text() == "x"

    @pytest.mark.parametrize("place", ["/proc/nowhere/out", "/dev/null/out", "x" * 300])
    def test_places_that_cannot_be_written(self, source: Path, tmp_path: Path, place: str) -> None:
        refused(OutputError, "cannot be", call=lambda: convert_checkpoint(source, tmp_path / place, 4))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]

    def test_missing_parents_come_and_go(self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        convert_checkpoint(source, tmp_path / "a" / "b" / "out", 4)
        assert (tmp_path / "a" / "b" / "out" / "config.json").is_file()
        _fail(monkeypatch, OSError(errno.EIO, "Input/output error"))
        refused(OutputError, "Input/output", call=lambda: convert_checkpoint(source, tmp_path / "c" / "d" / "out", 4))
        assert not (tmp_path / "c").exists()

    def test_something_appears_meanwhile(self, source: Path, out: Path) -> None:
        def appear(_: Any) -> None:
            out.mkdir()
            (out / "thesis.tex").write_text("x")

        for options in (ConversionOptions(), ConversionOptions(overwrite=True)):
            refused(
                OutputError,
                call=lambda: convert_checkpoint(source, out, 4, options, progress=_once(appear)),  # noqa: B023
            )
            assert digests(out).keys() == {"thesis.tex"}
            shutil.rmtree(out)
        assert leftovers(out.parent) == []

    def test_modes_follow_the_umask(self, source: Path, tmp_path: Path) -> None:
        for path in source.iterdir():
            path.chmod(0o600)
        previous = os.umask(0o027)
        try:
            convert_checkpoint(source, tmp_path / "out", 4)
        finally:
            os.umask(previous)
        assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750
        assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()} == {0o640}


def _once(call: Callable[[Any], None]) -> Callable[[int], None]:
    done: list[int] = []

    def progress(nbytes: int) -> None:
        if not done:
            call(nbytes)
        done.append(nbytes)

    return progress


def _fail(monkeypatch: pytest.MonkeyPatch, problem: BaseException) -> None:
    """Let the conversion fail when most of it is written."""

    def companions(*_: Any) -> None:
        raise problem

    monkeypatch.setattr(convert, "write_sidecar_files", companions)


class TestFailure:
    @pytest.mark.parametrize("old", [False, True])
    @pytest.mark.parametrize(
        ("problem", "kind"),
        [
            (OSError(errno.ENOSPC, "No space left on device"), NoSpaceError),
            (OSError(errno.EDQUOT, "Disk quota exceeded"), NoSpaceError),
            (OSError(errno.EIO, "Input/output error"), OutputError),
            (PermissionError(errno.EACCES, "Permission denied", "/x\ny"), OutputError),
            (OSError("bare"), OutputError),
            (CorruptCheckpointError("x"), CorruptCheckpointError),
        ],
    )
    def test_midway(
        self,
        source: Path,
        out: Path,
        monkeypatch: pytest.MonkeyPatch,
        problem: OSError,
        kind: type[GQAConvertError],
        old: bool,
    ) -> None:
        if old:
            convert_checkpoint(source, out, 3)
        before = digests(out.parent)
        _fail(monkeypatch, problem)
        refused(kind, call=lambda: convert_checkpoint(source, out, 4, ConversionOptions(overwrite=True)))
        assert digests(out.parent) == before
        assert leftovers(out.parent) == []

    @pytest.mark.parametrize(
        "problem", [KeyboardInterrupt(), InterruptedRunError("stopped"), MemoryError(), ValueError("a bug")]
    )
    def test_what_is_no_mistake_passes_through(
        self, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, problem: BaseException
    ) -> None:
        _fail(monkeypatch, problem)
        with pytest.raises(type(problem)):
            convert_checkpoint(source, out, 4)
        assert [path.name for path in out.parent.iterdir()] == ["source"]

    def test_too_little_space_is_seen_before(self, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        refused(NoSpaceError, "has 1,000 free", "make room", call=lambda: convert_checkpoint(source, out, 4))
        assert [path.name for path in out.parent.iterdir()] == ["source"]

    def test_a_disk_that_fills_up(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        small = tmp_path / "small"
        small.mkdir()
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", small], capture_output=True, check=False
        ).returncode:
            pytest.skip("tmpfs can't be mounted here")
        try:
            source = write_llama(tmp_path / "source", shards=2)
            refused(NoSpaceError, "make room", call=lambda: convert_checkpoint(source, small / "out", 4))
            monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
            refused(NoSpaceError, "full", call=lambda: convert_checkpoint(source, small / "a" / "out", 4))
            assert list(small.iterdir()) == []
        finally:
            subprocess.run(["umount", small], check=True)

    def test_a_shard_that_changes_meanwhile(self, source: Path, out: Path) -> None:
        last = source / "model-00003-of-00003.safetensors"
        good = last.read_bytes()
        changes: list[Callable[[], Any]] = [
            lambda: last.write_bytes(good[:-1] + b"x"),
            lambda: os.truncate(last, len(good) // 2),
            lambda: last.write_bytes(good + b"x"),
        ]
        for change in changes:
            refused(
                CorruptCheckpointError,
                last.name,
                call=lambda: convert_checkpoint(source, out, 4, on_plan=lambda _: (time.sleep(0.02), change())[0]),  # noqa: B023
            )
            refused(
                CorruptCheckpointError,
                "changed",
                call=lambda: (
                    last.write_bytes(good),
                    convert_checkpoint(source, out, 4, progress=_late(lambda: os.utime(last))),
                ),
            )
            last.write_bytes(good)
        last.unlink()
        assert sorted(path.name for path in out.parent.iterdir()) == ["source"]


def _late(call: Callable[[], Any]) -> Callable[[int], None]:
    """Call something when the last bytes have been written."""
    total = sum(array.nbytes for array in llama_arrays().values())
    seen = [0]

    def progress(nbytes: int) -> None:
        seen[0] += nbytes
        if seen[0] > total // 2:
            call()

    return progress


class TestCopy:
    @pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no /dev/shm")
    def test_to_another_filesystem(self, source: Path, tmp_path: Path) -> None:
        convert_checkpoint(source, tmp_path / "reference", 4)
        away = Path("/dev/shm") / f"{tmp_path.parent.name}-{os.getpid()}"
        try:
            convert_checkpoint(source, away / "out", 4)
            assert complete(away / "out", digests(tmp_path / "reference"))
        finally:
            shutil.rmtree(away)


class TestSweep:
    def test_a_live_run_keeps_its_folder(self, tmp_path: Path) -> None:
        script = (
            "import sys; from pathlib import Path; from gqa_convert.checkpoint.publication import StagedFolder\n"
            "with StagedFolder(Path(sys.argv[1])) as staged:\n"
            " (staged.path / 'x').touch(); print('ready', flush=True); sys.stdin.read()\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "out")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        ) as live:
            assert live.stdout is not None
            assert live.stdin is not None
            assert live.stdout.readline() == b"ready\n"
            assert sweep(tmp_path) == []
            assert len(leftovers(tmp_path)) == 2  # the folder and its lock
            live.kill()
            live.wait()
            assert len(sweep(tmp_path)) == 1
            assert list(tmp_path.iterdir()) == []

    def test_what_looks_alike_stays(self, tmp_path: Path) -> None:
        names = ["x.gqa-convert-01234567", ".x.gqa-convert-0123456", ".x.gqa-convert-0123456g", ".gqa-convert-01234567"]
        for name in names:
            (tmp_path / name).mkdir()
            (tmp_path / f"{name}.lock").touch()
        (tmp_path / ".y.gqa-convert-01234567").write_text("a file")
        (tmp_path / ".z.gqa-convert-01234567").symlink_to(names[0])
        assert sweep(tmp_path) == []
        assert len(list(tmp_path.iterdir())) == 2 * len(names) + 2
        assert sweep(tmp_path / "nowhere") == []

    def test_a_sweep_that_comes_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A sweep may take a run's lock before the run does, and removes the file when it lets go."""
        lock = publication.try_lock
        calls = []

        def late(path: Path, *, create: bool = True) -> int | None:
            calls.append(path)
            if len(calls) == 1:
                handle = lock(path)
                assert handle is not None
                assert lock(path) is None
                path.unlink()
                os.close(handle)
                return None
            return lock(path, create=create)

        monkeypatch.setattr(publication, "try_lock", late)
        with StagedFolder(tmp_path / "out") as staged:
            monkeypatch.undo()
            assert sweep(tmp_path) == []
            (staged.path / "config.json").touch()
            staged.publish(overwrite=False)
        assert len(calls) == 2
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]

    def test_a_filesystem_without_locks(self, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def unsupported(*_: Any) -> None:
            raise OSError(errno.EBADF, "Bad file descriptor")

        monkeypatch.setattr(fcntl, "flock", unsupported)
        other = [".other.gqa-convert-01234567", ".other.gqa-convert-01234567.lock"]
        (out.parent / other[0]).mkdir()
        (out.parent / other[1]).touch()
        convert_checkpoint(source, out, 4)
        assert (out / "config.json").is_file()
        assert sorted(leftovers(out.parent)) == other  # it may be a live one

    def test_a_filesystem_that_locks_only_what_is_open_for_writing(
        self, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """NFS, for one."""
        flock = fcntl.flock

        def strict(handle: int, operation: int) -> None:
            if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                raise OSError(errno.EBADF, "Bad file descriptor")
            flock(handle, operation)

        monkeypatch.setattr(fcntl, "flock", strict)
        (out.parent / ".dead.gqa-convert-01234567").mkdir()
        (out.parent / ".dead.gqa-convert-01234567.lock").touch()
        convert_checkpoint(source, out, 4)
        assert leftovers(out.parent) == []

    @pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
    def test_a_filesystem_that_syncs_no_folders(
        self, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        def sync(handle: int) -> None:
            if Path(f"/proc/self/fd/{handle}").readlink() == out.parent:
                raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "fsync", sync)
        if code == errno.EINVAL:
            convert_checkpoint(source, out, 4)
        else:
            words = "is complete, but the disk has not confirmed its name (Input/output error)"
            refused(OutputError, words, call=lambda: convert_checkpoint(source, out, 4))
        assert (out / "gqa_conversion.json").is_file()
        assert leftovers(out.parent) == []

    def test_a_filesystem_without_exchanges(self, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(publication, "_exchange", lambda *_: False)
        convert_checkpoint(source, out, 3)
        old = digests(out)
        refused(OutputError, call=lambda: convert_checkpoint(source, out, 4))
        convert_checkpoint(source, out, 4, ConversionOptions(overwrite=True))
        assert digests(out).keys() == old.keys()
        assert digests(out) != old
        assert leftovers(out.parent) == []

    def test_a_run_that_died_between_two_renames(self, tmp_path: Path) -> None:
        old, new = tmp_path / ".out.gqa-convert-01234567-old", tmp_path / ".out.gqa-convert-01234567"
        lock = tmp_path / ".out.gqa-convert-01234567.lock"
        for path in (old, new):
            path.mkdir()
            (path / "config.json").write_text(path.name)
        lock.touch()
        assert sweep(tmp_path) == [new]
        assert (tmp_path / "out" / "config.json").read_text() == old.name
        (tmp_path / "out").rename(old)
        (tmp_path / "out").mkdir()
        lock.touch()
        assert sweep(tmp_path) == [old]
        assert leftovers(tmp_path) == []

    @pytest.mark.parametrize("can_exchange", [True, False])
    def test_the_earlier_result_of_a_live_run_is_not_swept(
        self, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
    ) -> None:
        """Neither before it was checked for the user's files, nor given its name back meanwhile."""
        convert_checkpoint(source, out, 3)
        exchange, check = publication._exchange, publication.foreign_files
        swept = []

        def checked(folder: Path) -> list[str]:
            swept.append((folder.name, sweep(out.parent)))
            return check(folder)

        monkeypatch.setattr(publication, "_exchange", lambda *both: can_exchange and exchange(*both))
        monkeypatch.setattr(publication, "foreign_files", checked)
        convert_checkpoint(source, out, 4, ConversionOptions(overwrite=True))
        assert swept[-1][0].startswith(".out.gqa-convert-")
        assert [removed for _, removed in swept] == [[]] * len(swept)
        assert leftovers(out.parent) == []

    def test_check_destination_alone(self, tmp_path: Path) -> None:
        check_destination(tmp_path / "new", None, overwrite=False)


HARNESS = """
import os, signal, sys
from pathlib import Path
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import InterruptedRunError
from tests.helpers.checkpoints import digests

source, out = Path(sys.argv[1]), Path(sys.argv[2])
number, overwrite, module = getattr(signal, sys.argv[3]), sys.argv[4] == "True", sys.argv[5]
first, stride = map(int, sys.argv[6:])
os.fsync = lambda _: None  # it matters when the machine dies, not when the process does

def run(stop):
    # Convert in a forked process; at the given line of the modules that write files it gets the signal.
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    count = 0
    def trace(frame, event, _):
        nonlocal count
        if not frame.f_code.co_filename.endswith(module):
            return None
        if event == "line":
            count += 1
            if count == stop:
                os.kill(os.getpid(), number)
        return trace
    def stopped(*_):
        raise InterruptedRunError("stopped")
    if number != signal.SIGKILL:
        signal.signal(number, stopped)
    code = 3
    try:
        sys.settrace(trace)
        convert_checkpoint(source, out, 4, ConversionOptions(overwrite=overwrite))
        code = 0 if count < stop else 4
    except InterruptedRunError:
        code = 5
    finally:
        sys.settrace(None)
        os._exit(code)

convert_checkpoint(source, out, 4)
new = digests(out)
convert_checkpoint(source, out, 3, ConversionOptions(overwrite=True))
old = digests(out)
assert old != new
seen, stop, stops = set(), first, 0
while True:
    if overwrite:
        convert_checkpoint(source, out, 3, ConversionOptions(overwrite=True))
    else:
        import shutil
        if out.exists(): shutil.rmtree(out)
    status = run(stop)
    left = [path.name for path in out.parent.iterdir() if ".gqa-convert-" in path.name]
    found = digests(out) if out.exists() else "none"
    state = "new" if found == new else "old" if found == old else found
    assert state in ("new", "old" if overwrite else "none"), (stop, state, status)
    if state == "new":
        assert (out / "gqa_conversion.json").is_file()
    assert len(left) <= 2, (stop, left)  # the folder and its lock
    if status == 0:
        break
    assert os.WIFSIGNALED(status) if number == signal.SIGKILL else os.WEXITSTATUS(status) in (4, 5), (stop, status)
    seen.add((state, len(left)))
    stops += 1
    convert_checkpoint(source, out, 4, ConversionOptions(overwrite=True))
    assert digests(out) == new
    assert not [path.name for path in out.parent.iterdir() if ".gqa-convert-" in path.name]
    stop += stride
print(stops, sorted(seen))
"""


@pytest.mark.slow
class TestStopped:
    @pytest.mark.parametrize("overwrite", [False, True])
    @pytest.mark.parametrize("kind", ["SIGKILL", "SIGTERM"])
    @pytest.mark.parametrize(
        ("module", "stride"),
        [
            ("/checkpoint/publication.py", 4),
            ("/gqa_convert/conversion/writing.py", 20),
            ("/gqa_convert/conversion/run.py", 4),
            ("/gqa_convert/conversion/sidecar_files.py", 4),
        ],
    )
    def test_at_every_few_lines(
        self, source: Path, out: Path, module: str, stride: int, kind: str, overwrite: bool
    ) -> None:
        """Both signals together stop at every second or so line, half of them each."""
        first = 1 if kind == "SIGKILL" else 1 + stride // 2
        arguments = (source, out, kind, str(overwrite), module, str(first), str(stride))
        result = run_python("-c", HARNESS, *arguments, models=False)
        assert result.returncode == 0, result.stderr
        assert int(result.stdout.split()[0]) > 10
