"""OUT appears whole or not at all, whatever happens meanwhile."""

import errno
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

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
from gqa_convert.publishing import publication
from gqa_convert.publishing.publication import staged_folder, sweep
from tests.helpers.checkpoints import by_mean, digests, llama_arrays, refused, write_llama
from tests.helpers.uptrain_runs import AtFileEvent, die, in_child

ROOT = Path(__file__).parents[2]
RUN = ".out.gqa-convert-01234567"
"""The folder of another run."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "source", shards=3)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if ".gqa-convert-" in path.name)


class TestDestination:
    def test_overwrite_replaces_everything_and_nothing_else_does(
        self, source: Path, out: Path, tmp_path: Path
    ) -> None:
        by_mean(source, tmp_path / "reference")
        by_mean(write_llama(tmp_path / "other", shards=2), out, 3)
        before = digests(out, ignore=())
        with refused(OutputError, "exists already", "--overwrite"):
            by_mean(source, out)
        assert digests(out, ignore=()) == before
        by_mean(source, out, overwrite=True)
        assert digests(out) == digests(tmp_path / "reference")
        assert (out / "gqa_conversion.json").is_file()
        assert leftovers(tmp_path) == []

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_the_source_and_its_neighbourhood(
        self, source: Path, tmp_path: Path, overwrite: bool
    ) -> None:
        before = digests(tmp_path)
        (tmp_path / "link").symlink_to(source)
        (tmp_path / "config.json").write_text("{}")
        inside = (
            source,
            source / ".." / "source",
            tmp_path / "link",
            tmp_path / "link" / "sub",
            source / "a" / "b",
        )
        for place in (*inside, tmp_path, Path("/")):
            with refused(
                OutputError, f"{place} is the source {source}, lies inside it or contains it"
            ):
                by_mean(source, place, overwrite=overwrite)
        (tmp_path / "config.json").unlink()
        (tmp_path / "link").unlink()
        assert digests(tmp_path) == before

    def test_a_source_that_links_into_out(self, source: Path, out: Path) -> None:
        shutil.copytree(source, out)
        for path in source.glob("*.safetensors"):
            path.unlink()
            path.symlink_to(out / path.name)
        with refused(OutputError, "links to"):
            by_mean(source, out, overwrite=True)

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_links_and_files(
        self, source: Path, out: Path, tmp_path: Path, overwrite: bool
    ) -> None:
        (tmp_path / "elsewhere").mkdir()
        for target in ("elsewhere", "nowhere", "out"):
            out.symlink_to(target)
            with refused(OutputError, "is a link"):
                by_mean(source, out, overwrite=overwrite)
            out.unlink()
        out.write_text("x")
        with refused(OutputError, "is a file"):
            by_mean(source, out, overwrite=overwrite)
        with refused(OutputError, "cannot be read or written"):
            by_mean(source, out / "sub" / "sub")
        assert out.read_text() == "x"

    @pytest.mark.parametrize("place", ["/proc/nowhere/out", "/dev/null/out", "x" * 300])
    def test_places_that_cannot_be_written(self, source: Path, tmp_path: Path, place: str) -> None:
        with refused(OutputError, "cannot be"):
            by_mean(source, tmp_path / place)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_something_appears_meanwhile(self, source: Path, out: Path, overwrite: bool) -> None:
        def appear(_: Any) -> None:
            out.mkdir(exist_ok=True)
            (out / "thesis.tex").write_text("x")

        options = ConversionOptions(method="mean", overwrite=overwrite)
        with refused(OutputError):
            convert_checkpoint(source, out, 4, options, progress=appear)
        assert digests(out).keys() == {"thesis.tex"}
        assert leftovers(out.parent) == []

    def test_modes_follow_the_umask(self, source: Path, tmp_path: Path) -> None:
        for path in source.iterdir():
            path.chmod(0o600)
        previous = os.umask(0o027)
        try:
            by_mean(source, tmp_path / "out")
        finally:
            os.umask(previous)
        assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750
        assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()} == {
            0o640
        }


def _fail(monkeypatch: pytest.MonkeyPatch, problem: BaseException) -> None:
    """Let the conversion fail when most of it is written."""

    def fails(*_: Any) -> None:
        raise problem

    monkeypatch.setattr(convert, "write_sidecar_files", fails)


class TestFailure:
    @pytest.mark.parametrize("old", [False, True])
    @pytest.mark.parametrize(
        ("problem", "kind"),
        [
            (OSError(errno.ENOSPC, "No space left on device"), NoSpaceError),
            (OSError(errno.EDQUOT, "Disk quota exceeded"), NoSpaceError),
            (PermissionError(errno.EACCES, "Permission denied", "/x\ny"), OutputError),
            (OSError("bare"), OutputError),
            (CorruptCheckpointError("x"), CorruptCheckpointError),
            (KeyboardInterrupt(), None),
            (InterruptedRunError("stopped"), None),
            (ValueError("a bug"), None),
        ],
    )
    def test_midway(
        self,
        source: Path,
        out: Path,
        monkeypatch: pytest.MonkeyPatch,
        problem: BaseException,
        kind: type[GQAConvertError] | None,
        old: bool,
    ) -> None:
        """Errors of the system are explained; what is no mistake of the user's passes through."""
        if old:
            by_mean(source, out, 3)
        before = digests(out.parent)
        _fail(monkeypatch, problem)
        with pytest.raises(type(problem)) if kind is None else refused(kind):
            by_mean(source, out, overwrite=True)
        assert digests(out.parent) == before
        assert sorted(path.name for path in out.parent.iterdir()) == (
            ["out", "source"] if old else ["source"]
        )

    def test_missing_parents_are_made(self, source: Path, tmp_path: Path) -> None:
        by_mean(source, tmp_path / "a" / "b" / "out")
        assert (tmp_path / "a" / "b" / "out" / "config.json").is_file()

    def test_too_little_space_is_seen_before(
        self, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        with refused(NoSpaceError, "has 1,000 free", "make room"):
            by_mean(source, out)
        assert [path.name for path in out.parent.iterdir()] == ["source"]

    def test_a_disk_that_fills_up(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        small = tmp_path / "small"
        small.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", small]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("tmpfs can't be mounted here")
        try:
            source = write_llama(tmp_path / "source", shards=2)
            monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
            with refused(NoSpaceError, "full"):
                by_mean(source, small / "out")
            assert list(small.iterdir()) == []
        finally:
            subprocess.run(["umount", small], check=True)

    @pytest.mark.parametrize("change", ["another byte", "shorter", "longer"])
    def test_a_shard_that_changes_meanwhile(self, source: Path, out: Path, change: str) -> None:
        last = source / "model-00003-of-00003.safetensors"
        good = last.read_bytes()
        bad = {
            "another byte": good[:-1] + b"x",
            "shorter": good[: len(good) // 2],
            "longer": good + b"x",
        }[change]
        with refused(CorruptCheckpointError, last.name):
            convert_checkpoint(
                source, out, 4, on_plan=lambda _: (time.sleep(0.02), last.write_bytes(bad))[0]
            )
        last.write_bytes(good)
        with refused(CorruptCheckpointError, "changed"):
            convert_checkpoint(source, out, 4, progress=_late(lambda: os.utime(last)))
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


class TestSweep:
    def test_a_live_run_keeps_its_folder(self, tmp_path: Path) -> None:
        script = (
            "import sys; from pathlib import Path; "
            "from gqa_convert.publishing.publication import staged_folder\n"
            "with staged_folder(Path(sys.argv[1])) as staged:\n"
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
            sweep(tmp_path)
            assert len(leftovers(tmp_path)) == 2  # the folder and its lock
            live.kill()
            live.wait()
            sweep(tmp_path)
            assert list(tmp_path.iterdir()) == []

    def test_what_looks_alike_stays(self, tmp_path: Path) -> None:
        names = [
            "x.gqa-convert-01234567",
            ".x.gqa-convert-0123456",
            ".x.gqa-convert-0123456g",
            ".gqa-convert-01234567",
        ]
        for name in names:
            (tmp_path / name).mkdir()
            (tmp_path / f"{name}.lock").touch()
        (tmp_path / ".y.gqa-convert-01234567").write_text("a file")
        (tmp_path / ".z.gqa-convert-01234567").symlink_to(names[0])
        sweep(tmp_path)
        assert len(list(tmp_path.iterdir())) == 2 * len(names) + 2
        sweep(tmp_path / "nowhere")

    def test_a_sweep_that_comes_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A sweep may take a run's lock before the run does, and removes the file afterwards."""
        lock = publication.try_lock
        calls = []

        def late(path: Path) -> int | None:
            calls.append(path)
            if len(calls) == 1:
                handle = lock(path)
                assert handle is not None
                assert lock(path) is None
                path.unlink()
                os.close(handle)
                return None
            return lock(path)

        monkeypatch.setattr(publication, "try_lock", late)
        with staged_folder(tmp_path / "out") as staged:
            monkeypatch.undo()
            sweep(tmp_path)
            (staged.path / "config.json").touch()
            staged.publish(overwrite=False)
        assert len(calls) == 2
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]

    @pytest.mark.parametrize("lockable", ["nothing", "what is open for writing"])
    def test_a_filesystem_with_few_locks(
        self, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, lockable: str
    ) -> None:
        """NFS is one that locks only what is open for writing; without locks, any run may be a live
        one.
        """
        flock = fcntl.flock

        def limited(handle: int, operation: int) -> None:
            if (
                lockable == "nothing"
                or fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            ):
                raise OSError(errno.EBADF, "Bad file descriptor")
            flock(handle, operation)

        monkeypatch.setattr(fcntl, "flock", limited)
        other = [RUN, f"{RUN}.lock"]
        (out.parent / other[0]).mkdir()
        (out.parent / other[1]).touch()
        by_mean(source, out)
        assert (out / "config.json").is_file()
        assert leftovers(out.parent) == (other if lockable == "nothing" else [])

    @pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
    def test_a_filesystem_that_syncs_no_folders(
        self, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        def sync(handle: int) -> None:
            if Path(f"/proc/self/fd/{handle}").readlink() == out.parent:
                raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "fsync", sync)
        if code == errno.EINVAL:
            by_mean(source, out)
        else:
            words = "is complete, but the disk has not confirmed its name (Input/output error)"
            with refused(OutputError, words):
                by_mean(source, out)
        assert (out / "gqa_conversion.json").is_file()
        assert leftovers(out.parent) == []

    def test_the_earlier_result_of_a_live_run_is_not_swept(
        self, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Before it was checked for the user's files; if the check fails, it has its name again."""
        by_mean(source, out, 3)
        old = digests(out)
        check = publication.foreign_files
        checked_names = []

        def checked(folder: Path) -> list[str]:
            checked_names.append(folder.name)
            before = leftovers(out.parent)
            sweep(out.parent)
            assert leftovers(out.parent) == before
            if len(checked_names) == 2:
                raise OSError(errno.EIO, "Input/output error")
            return check(folder)

        monkeypatch.setattr(publication, "foreign_files", checked)
        with refused(OutputError, "Input/output error"):
            by_mean(source, out, overwrite=True)
        assert checked_names[-1].startswith(".out.gqa-convert-")
        assert digests(out) == old
        by_mean(source, out, overwrite=True)
        assert digests(out).keys() == old.keys()
        assert digests(out) != old
        assert leftovers(out.parent) == []

    def test_a_filesystem_that_cannot_exchange_folders(
        self, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        by_mean(source, out, 3)
        old = digests(out)
        monkeypatch.setattr(publication, "_RENAME_EXCHANGE", 1 << 20)
        monkeypatch.setattr(
            "gqa_convert.conversion.run.prepare_layers",
            lambda *_: pytest.fail("the work has begun"),
        )
        with refused(OutputError, "cannot exchange it for the new one in one step"):
            by_mean(source, out, overwrite=True)
        assert digests(out) == old
        assert leftovers(out.parent) == []


def interrupt() -> None:
    raise InterruptedRunError("stopped")


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("act", [die, interrupt])
def test_stopped_at_every_file_event(
    source: Path, out: Path, act: Callable[[], None], overwrite: bool
) -> None:
    """OUT is the earlier result or the new one, or nothing; and the next run leaves nothing of the
    one that was stopped.
    """
    by_mean(source, out.parent / "new")
    new = digests(out.parent / "new")
    number, status = 0, -1
    while status:
        if out.exists():
            shutil.rmtree(out)
        if overwrite:
            by_mean(source, out, 3)
        old = digests(out) if overwrite else None
        number += 1

        def run(number: int = number) -> None:
            AtFileEvent(out.parent, number, act)
            by_mean(source, out, overwrite=overwrite)

        status, _ = in_child(run)
        assert status in (0, -signal.SIGKILL if act is die else InterruptedRunError.exit_code), (
            number
        )
        found = digests(out) if out.exists() else None
        assert found in (new, old), number
        assert found != new or (out / "gqa_conversion.json").is_file()
        assert len(leftovers(out.parent)) <= 2, "the folder and its lock"
        by_mean(source, out, overwrite=True)
        assert digests(out) == new
        assert leftovers(out.parent) == []
    assert number > 20
