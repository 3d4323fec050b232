"""Runs a child process that leaves no grandchildren and no open pipes behind and can't ask questions at the terminal."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def run(command: Sequence[str], folder: Path, seconds: float = 60.0) -> tuple[int | None, list[str], list[str]]:
    """Run a command offline, and kill all its descendants when it ends, when its time is up and when this program is
    stopped. Another interpreter does not get this program's module path.

    Args:
        command: its words.
        folder: in which it works, and what it prints is kept.
        seconds: time limit.

    Returns:
        Its exit code, the negative signal number if a signal killed it, None if its time was up; and lines of stdout and
        of stderr.

    Raises:
        OSError: the program does not exist.
    """
    variables = dict(os.environ) | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    if "LLAMA_CPP" in variables:  # relative to the user's folder
        variables["LLAMA_CPP"] = str(Path(variables["LLAMA_CPP"]).absolute())
    if command[0] != sys.executable:
        variables.pop("PYTHONPATH", None)
    files = [folder / name for name in ("output", "errors")]
    with files[0].open("wb") as output, files[1].open("wb") as errors:
        process = subprocess.Popen(
            command,
            env=variables,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
    code = None
    try:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(seconds)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    printed, complained = (file.read_text(errors="replace").strip().splitlines() for file in files)
    return code, printed, complained
