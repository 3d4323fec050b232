"""Processes that run the command line, each a fork of this one, which has imported the libraries already."""

import contextlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_MODULES = ".modules"
"""The file in which a process leaves the names of the modules that it imported."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended: its exit code, negative for a signal, what it printed, and how long it ran."""

    code: int
    printed: str
    seconds: float


def import_modules_of(folder: Path) -> None:
    """Import what the last process in a folder imported, so that the next ones need not. No thread is started by it."""
    path = folder / _MODULES
    for name in path.read_text(encoding="utf-8").split():
        if not name.startswith("gqa_convert"):
            with contextlib.suppress(Exception):  # some modules exist in their own process alone
                importlib.import_module(name)
    path.unlink()


def run_process(
    arguments: Sequence[str],
    folder: Path,
    kill_after: float | None = None,
    *,
    prepare: Callable[[], None] = lambda: None,
    list_modules: bool = False,
) -> Ended:
    """Run `gqa-convert ARGUMENTS` in a folder.

    Args:
        arguments: of the command line.
        folder: the working directory, in which `.printed` receives stdout and stderr.
        kill_after: seconds until the process is killed with SIGKILL, if it still runs then.
        prepare: called in the process before the command.
        list_modules: leave a list for `import_modules_of`.
    """
    log = folder / ".printed"
    began = time.monotonic()
    pid = os.fork()
    if not pid:
        _become(arguments, folder, log, prepare, list_modules=list_modules)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)  # a process that has ended keeps its id until it is waited for
    _, status = os.waitpid(pid, 0)
    seconds = time.monotonic() - began
    printed = log.read_text(encoding="utf-8", errors="replace")
    log.unlink()
    return Ended(os.waitstatus_to_exitcode(status), printed, seconds)


def _become(
    arguments: Sequence[str], folder: Path, log: Path, prepare: Callable[[], None], *, list_modules: bool
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
        if list_modules:
            (folder / _MODULES).write_text("\n".join(sys.modules), encoding="utf-8")
        os._exit(code)
