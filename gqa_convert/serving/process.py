"""Runs a child process that leaves no grandchildren and no open pipes behind and can't ask questions at the terminal."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_TAIL = 65536


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        code: its exit code, the negative signal number if a signal killed it, None if its time was up.
        output: nonblank lines of stdout, the last ones of a long output.
        errors: the same of stderr.
    """

    code: int | None
    output: list[str]
    errors: list[str]

    def __str__(self) -> str:
        if self.code is None:
            how = "not done when its time was up"
        elif self.code < 0:
            how = f"killed by {signal.Signals(-self.code).name}"
        else:
            how = f"ended with exit code {self.code}"
        return ": ".join((how, *self.errors[-1:]))


def run(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    seconds: float | None = None,
) -> Ended:
    """Run a command, and kill all its descendants when it ends, when its time is up and when this program is stopped.

    Args:
        command: its words.
        environment: its variables; by default those of this program.
        folder: its working directory.
        seconds: time limit, None for no limit.

    Raises:
        OSError: the program does not exist.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
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
        return Ended(code, _lines(output), _lines(errors))


def _lines(file: BinaryIO) -> list[str]:
    file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
    return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
