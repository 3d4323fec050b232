"""Runs a child process that leaves no grandchildren and no open pipes behind and can't ask questions at the terminal."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        code: its exit code, the negative signal number if a signal killed it, None if its time was up.
        output: lines of stdout.
        errors: lines of stderr.
    """

    code: int | None
    output: list[str]
    errors: list[str]

    def __str__(self) -> str:
        how = "not done when its time was up" if self.code is None else f"ended with exit code {self.code}"
        return ": ".join((how, *self.errors[-1:]))


def run(command: Sequence[str], seconds: float = 60.0) -> Ended:
    """Run a command in an empty folder and offline, and kill all its descendants when it ends, when its time is up and
    when this program is stopped. Another interpreter does not get this program's module path.

    Args:
        command: its words.
        seconds: time limit.

    Raises:
        OSError: the program does not exist.
    """
    variables = dict(os.environ) | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    if "LLAMA_CPP" in variables:  # relative to the user's folder, not to the empty one
        variables["LLAMA_CPP"] = str(Path(variables["LLAMA_CPP"]).absolute())
    if command[0] != sys.executable:
        variables.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory(prefix="gqa-convert-") as folder:
        files = [Path(folder, name) for name in ("output", "errors")]
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
        found = [file.read_text(errors="replace").strip().splitlines() for file in files]
        return Ended(code, *found)
