"""Commands in surroundings that are not as they should be: full disks, closed pipes, folders that are gone."""

import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.robustness.commands import COMMANDS, template, use_caches_in
from benchmarks.robustness.outcomes import Case, Outcome
from benchmarks.robustness.processes import import_modules, run_process
from benchmarks.robustness.sources import digests

_DISK = 4 << 20
"""The bytes of a small disk."""
_CONTINUED = ("run/", "cache/", ".out.gqa-merging/")
"""What a repeated command continues from: checkpoints, tokens, merged layers."""
NOBODY = 54_321
"""A user without an entry in the list of users, as in a container."""

READING: dict[str, tuple[str, ...]] = {
    "plan": ("plan", "model", "-n", "2"),
    "plan --json": ("plan", "model", "-n", "2", "--json"),
    "inspect": ("inspect", "model"),
    "verify": ("verify", "pooled", "--source", "model", "--no-logits"),
    "evaluate": (
        "evaluate",
        "pooled",
        "--reference",
        "model",
        "--data",
        "text.txt",
        "--tokens",
        "256",
        "--context",
        "32",
    ),
    "benchmark": (
        "benchmark",
        "model",
        "-n",
        "2,4",
        "--context",
        "16",
        "--steps",
        "1",
        "--repetitions",
        "1",
        "--batch",
        "1",
    ),
}
"""Commands that write no file, whose stdout is the result."""


@dataclass(frozen=True, slots=True)
class Surrounding:
    """One surrounding.

    Attributes:
        name: its row of the table.
        prepare: called in the process before the command, with the working folder.
        codes: exit codes that are right.
        absolute: whether paths are absolute.
        reading: whether commands that write no file are tried too.
        free: the bytes that are free on the disk of the working folder, which is a small one then.
    """

    name: str
    prepare: Callable[[Path], None]
    codes: tuple[int, ...] = (0,)
    absolute: bool = False
    reading: bool = True
    free: int | None = None


def _environment(**values: str | None) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        del folder
        for name, value in values.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    return prepare


def _nothing(folder: Path) -> None:
    del folder


def _no_home(folder: Path) -> None:
    _environment(HOME=None, XDG_CACHE_HOME=None)(folder)
    os.setuid(NOBODY)


def _read_only(folder: Path) -> None:
    """Root may write anywhere, so another user runs the command in a folder of root's."""
    _environment(XDG_CACHE_HOME=None, HOME="/nonexistent")(folder)
    os.setuid(NOBODY)


def _gone(folder: Path) -> None:
    place = folder.with_name("gone")
    place.mkdir()
    os.chdir(place)
    place.rmdir()


def _small_files(folder: Path) -> None:
    del folder
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))


def _full_stdout(folder: Path) -> None:
    del folder
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def _closed_pipe(folder: Path) -> None:
    """A reader that ends at once is what `head -1` is to a command with long output."""
    del folder
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)


SURROUNDINGS = (
    Surrounding("spaces, unicode, trailing slash", _nothing),
    Surrounding("LC_ALL=C, ascii streams", _environment(LC_ALL="C", PYTHONIOENCODING="ascii")),
    Surrounding("COLUMNS=40", _environment(COLUMNS="40")),
    Surrounding("no HOME, unknown user", _no_home, (0, 2)),
    Surrounding("unwritable HOME", _environment(HOME="/proc", XDG_CACHE_HOME=None), (0, 2)),
    Surrounding("read-only folder", _read_only, (1, 2), reading=False),
    Surrounding("deleted working directory", _gone, (2,), absolute=True),
    Surrounding("full disk", _nothing, (2,), reading=False, free=0),
    Surrounding("disk with 24 KiB free", _nothing, (0, 2), reading=False, free=24 << 10),
    Surrounding("files of 1,000 bytes at most", _small_files, (0, 1, 2), reading=False),
    Surrounding("stdout on a full disk", _full_stdout, (1,)),
    Surrounding("stdout closed, as by head", _closed_pipe),
)


def run_surroundings(folder: Path, only: str | None = None) -> Iterator[Case]:
    """Yield a case for each command in each surrounding."""
    use_caches_in(folder)
    for command in COMMANDS:
        yield from _tried(folder, command.name, command.arguments, command.prepared_by, writes=True, only=only)
    for name, arguments in READING.items():
        prepared = ("convert", "model", "pooled", "-n", "2", "-m", "mean", "-q") if "pooled" in arguments else ()
        yield from _tried(folder, name, arguments, prepared, writes=False, only=only)


def _tried(
    folder: Path, name: str, arguments: Sequence[str], prepared: tuple[str, ...], *, writes: bool, only: str | None
) -> Iterator[Case]:
    chosen = [each for each in SURROUNDINGS if (writes or each.reading) and only in (None, name, each.name)]
    if not chosen:
        return
    folder.chmod(0o755)  # for another user
    original = template(folder / "template", prepared)
    work = Path(shutil.copytree(original, folder / "warm"))
    import_modules(run_process(arguments, work, notes=True).modules, own=False)
    shutil.rmtree(work)
    for each in chosen:
        yield _case(folder, original, name, arguments, each, writes=writes)
    shutil.rmtree(original)


def _case(
    folder: Path, original: Path, name: str, arguments: Sequence[str], each: Surrounding, *, writes: bool
) -> Case:
    with ExitStack() as stack:
        work = _working_folder(folder / "with spaces, ümläute and 漢字", original, each.free, stack)
        return _judged(work, name, arguments, each, writes=writes)


def _working_folder(work: Path, original: Path, free: int | None, stack: ExitStack) -> Path:
    """A copy of `original`, if `free` is given on a disk of its own with that many bytes free, until `stack` is closed."""
    work.mkdir()
    stack.callback(shutil.rmtree, work)
    if free is not None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", work], check=True)
        stack.callback(_unmount, work)
    shutil.copytree(original, work, dirs_exist_ok=True)
    if free is not None:
        (work / "large").write_bytes(bytes(shutil.disk_usage(work).free - free))
    return work


def _unmount(folder: Path) -> None:
    subprocess.run(["umount", "--lazy", folder], check=True)


def _judged(work: Path, name: str, arguments: Sequence[str], each: Surrounding, *, writes: bool) -> Case:
    if each.prepare is _no_home:
        for path in (work, *work.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
    before = digests(work)
    given = [_placed(argument, work, absolute=each.absolute) for argument in arguments]
    ended = run_process(given, work, prepare=lambda: each.prepare(work))
    after = digests(work)
    label = f"{name}: {' '.join(arguments)}"
    detail = f"{ended.code}\n{ended.printed}"
    if "Traceback" in ended.printed or ended.code < 0:
        return Case(each.name, label, Outcome.TRACEBACK, detail)
    changed = {path for path, digest in before.items() if after.get(path) != digest}
    done = ended.code == 0 or each.prepare is _full_stdout
    if {path for path in changed if path != "pooled/README.md" and not (done and path.startswith("out/"))}:
        return Case(each.name, label, Outcome.SOURCE_CHANGED, f"{sorted(changed)} {detail}")
    if ended.code not in each.codes or (ended.code == 0 and writes and before == after and "tokenize" not in name):
        return Case(each.name, label, Outcome.OTHER, detail)
    if ended.code == 0:
        return Case(each.name, label, Outcome.RIGHT)
    if not any(line.startswith("gqa-convert: ") for line in ended.printed.splitlines()[-2:]):
        return Case(each.name, label, Outcome.OTHER, detail)
    if each.prepare is _full_stdout:
        return Case(each.name, label, Outcome.REFUSED, detail)  # the work is done, and its message is lost
    left = sorted(path for path in after.keys() - before.keys() if not path.startswith(_CONTINUED))
    if left:
        return Case(each.name, label, Outcome.HALF_WRITTEN, f"{left} {detail}")
    return Case(each.name, label, Outcome.REFUSED, detail)


def _placed(argument: str, work: Path, *, absolute: bool) -> str:
    """A path with a trailing slash if it is a folder."""
    if not (work / argument).exists() and argument not in ("out", "page"):
        return argument
    path = str(work / argument) if absolute else argument
    return f"{path}/" if (work / argument).is_dir() else path
