"""Processes that begin as forks of one that has imported the large libraries, so that none spends
seconds on that.

Each has its own working directory, streams, signals and exit code.
"""

import atexit
import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(Path(__file__).with_suffix(".txt").read_text().split())

_OF_THE_HUB = ("HF_", "HUGGINGFACE_", "TRANSFORMERS_")
_AT_IMPORT = (*_OF_THE_HUB, "TORCH_", "PYTHON", "OMP_", "MALLOC_", "HOME", "PATH", "TMPDIR")
"""How the names of variables begin that a library, C's too, or the interpreter may read before
the program runs.
"""

_READ_THEM = ("huggingface_hub", "transformers", "datasets", "accelerate", "peft", "gqa_convert")
"""Libraries that read the Hub's variables when they are imported, and those that import them."""

_QUIET = {"TRANSFORMERS_VERBOSITY": "error"}
"""What gqa_convert sets before it imports transformers."""

_STARTED_IN = dict(os.environ)
"""What the server starts with, taken before any test can change it."""


def _changed(environment: Mapping[str, str]) -> set[str]:
    """The variables that are not as they were when the server imported its libraries."""
    return {
        name
        for name, _ in environment.items() ^ _STARTED_IN.items()
        if name.startswith(_AT_IMPORT) and name not in _QUIET
    }


def serves(environment: Mapping[str, str]) -> bool:
    """Whether a fork does in this environment what a new interpreter would do."""
    return all(name.startswith(_OF_THE_HUB) for name in _changed(environment))


def start(
    work: Callable[..., object],
    arguments: tuple[Any, ...],
    environment: Mapping[str, str],
    out: Path,
    err: Path,
) -> ForkServerProcess:
    """Start a process.

    Args:
        work: what it does; its exit code is that of SystemExit.
        arguments: for it.
        environment: its variables.
        out: the file that its output goes to.
        err: the file that its errors go to.
    """
    with mock.patch.dict(os.environ, _STARTED_IN | _QUIET, clear=True):
        forkserver.ensure_running()
    folder = str(Path.cwd())
    process = CONTEXT.Process(
        target=_begin, args=(work, arguments, dict(environment), folder, out, err), daemon=True
    )
    process.start()
    return process


def _begin(
    work: Callable[..., object],
    arguments: tuple[Any, ...],
    environment: dict[str, str],
    folder: str,
    *files: Path,
) -> None:
    gc.freeze()  # nothing of the server is garbage, and looking for it would copy its memory
    for number, file in enumerate(files, 1):
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, number)
        os.close(handle)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if _changed(environment):
        for name in [name for name in sys.modules if name.partition(".")[0] in _READ_THEM]:
            del sys.modules[name]
    atexit._clear()  # of what the server registered
    try:
        work(*arguments)
    finally:
        atexit._run_exitfuncs()
