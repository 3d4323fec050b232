"""Processes that run the command line, each a fork of this one, which has imported the libraries already."""

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NOTES = ".notes"
"""The file in which a process leaves the names of the modules that it imported and the number of its file events."""
_EVENTS = frozenset(
    ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree")
)
_EXCHANGE = "renameat2"
"""The name of a function of libc that publishes folders; looking it up counts as an event."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended.

    Attributes:
        code: the exit code, negative for a signal.
        printed: stdout and stderr.
        seconds: how long it ran.
        events: how often it touched a file below its folder; counted only if notes were asked for.
        modules: what it had imported, likewise.
    """

    code: int
    printed: str
    seconds: float
    events: int = 0
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Kill:
    """When a process and its children are killed with SIGKILL.

    Attributes:
        seconds: this long after its start, if it still runs then.
        event: right before it touches a file below its folder for the n-th time, its inputs apart.
    """

    seconds: float | None = None
    event: int | None = None

    def __str__(self) -> str:
        return f"after {self.seconds:.3f} s" if self.seconds is not None else f"at file event {self.event}"


def import_modules(names: Sequence[str], *, own: bool) -> None:
    """Import what a process imported, so that the next ones need not. No thread is started by it.

    Args:
        names: of the modules.
        own: whether the package's modules are among them, which read no variable of the environment that differs then.
    """
    for name in names:
        if own or not name.startswith("gqa_convert"):
            with contextlib.suppress(Exception):  # some modules exist in their own process alone
                importlib.import_module(name)
    gc.collect()
    gc.freeze()  # forks neither look for garbage among all modules nor copy their memory for that


def run_process(
    arguments: Sequence[str],
    folder: Path,
    kill: Kill | None = None,
    *,
    inputs: Sequence[str] = (),
    prepare: Callable[[], None] = lambda: None,
    notes: bool = False,
) -> Ended:
    """Run `gqa-convert ARGUMENTS` in a folder.

    Args:
        arguments: of the command line.
        folder: the working directory. What is printed goes to a file beside it, whose disk may be another one.
        kill: when the process is killed.
        inputs: names in the folder whose files are only read, so that touching them counts as no event.
        prepare: called in the process before the command.
        notes: report modules and events.
    """
    log = folder.with_name(f"{folder.name}.printed")
    began = time.monotonic()
    pid = os.fork()
    if not pid:
        events = _FileEvents(folder, inputs, kill.event if kill else None)
        _become(arguments, folder, log, prepare, events, notes=notes)
    with contextlib.suppress(OSError):  # it does so itself, and may have ended
        os.setpgid(pid, pid)
    if kill is not None and kill.seconds is not None:
        time.sleep(kill.seconds)
        os.killpg(pid, signal.SIGKILL)  # a process that has ended keeps its id until it is waited for
    _, status = os.waitpid(pid, 0)
    seconds = time.monotonic() - began
    printed = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    found: dict[str, Any] = {}
    if notes:
        found = json.loads((folder / _NOTES).read_text(encoding="utf-8"))
        (folder / _NOTES).unlink()
    log.unlink(missing_ok=True)
    return Ended(
        os.waitstatus_to_exitcode(status), printed, seconds, found.get("events", 0), tuple(found.get("modules", ()))
    )


class _FileEvents:
    """Counts the events of this process, and kills its group at one of them."""

    def __init__(self, folder: Path, inputs: Sequence[str], last: int | None) -> None:
        self.count = 0
        self._folder, self._last = str(folder), last
        self._apart = tuple(str(folder / name) for name in (*inputs, _NOTES))

    def watch(self) -> None:
        """Begin to count, for good."""
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "ctypes.dlsym":
            counts = arguments[1] == _EXCHANGE
        elif event in _EVENTS and isinstance(arguments[0], str | bytes | os.PathLike):
            path = os.path.join(self._folder, os.fsdecode(arguments[0]))  # noqa: PTH118  # hooks must be quick
            counts = path.startswith(f"{self._folder}/") and not path.startswith(self._apart)
        else:
            return
        self.count += counts
        if counts and self.count == self._last:
            os.killpg(0, signal.SIGKILL)


def _become(
    arguments: Sequence[str],
    folder: Path,
    log: Path,
    prepare: Callable[[], None],
    events: _FileEvents,
    *,
    notes: bool,
) -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.argv = ["gqa-convert", *arguments]
        prepare()
        for name, number in (("stdout", 1), ("stderr", 2)):  # of the new files
            setattr(sys, name, open(number, "w", encoding=os.environ.get("PYTHONIOENCODING"), closefd=False))  # noqa: SIM115
        from gqa_convert.cli import main

        events.watch()
        main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        if notes:
            content = {"modules": list(sys.modules), "events": events.count}
            (folder / _NOTES).write_text(json.dumps(content), encoding="utf-8")
        os._exit(code)
