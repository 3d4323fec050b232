"""Runs a child process that leaves no grandchildren and no open pipes behind and can't ask questions at the terminal."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        code: its exit code, the negative signal number if a signal killed it, None if its time was up.
        output: nonblank lines of stdout.
        errors: nonblank lines of stderr.
    """

    code: int | None
    output: list[str]
    errors: list[str]

    def __str__(self) -> str:
        how = f"ended with exit code {self.code}"
        if self.code is None:
            how = "not done when its time was up"
        elif self.code < 0:
            how = f"killed by {signal.Signals(-self.code).name}"
        return ": ".join((how, *self.errors[-1:]))


def run(command: Sequence[str], environment: Mapping[str, str] | None = None, seconds: float = 60.0) -> Ended:
    """Run a command in an empty folder, and kill all its descendants when it ends, when its time is up and when this
    program is stopped.

    Args:
        command: its words.
        environment: its variables; by default those of this program.
        seconds: time limit.

    Raises:
        OSError: the program does not exist.
    """
    with tempfile.TemporaryDirectory(prefix="gqa-convert-") as folder:
        files = [Path(folder, name) for name in ("output", "errors")]
        with files[0].open("wb") as output, files[1].open("wb") as errors:
            process = subprocess.Popen(
                command,
                env=environment,
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
        return Ended(code, *([*filter(str.strip, file.read_text(errors="replace").splitlines())] for file in files))
