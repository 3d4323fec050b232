"""Runs the program, or Python, in another process."""

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.helpers import fork_server


def run(*arguments: str | Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run `gqa-convert ARGUMENTS` in another process and return its exit code and output."""
    return run_python("-m", "gqa_convert", *arguments, timeout=timeout)


def run_python(
    *arguments: str | Path, timeout: float = 120, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS`, which begin with `-m MODULE` or `-c CODE`.

    It is a new interpreter only where a variable differs from the suite's that a library may read
    while it is imported.

    Args:
        arguments: what follows `python`.
        timeout: the seconds after which the program is killed.
        environment: the program's variables; by default those of this process.
    """
    words = [str(argument) for argument in arguments]
    given = os.environ if environment is None else environment
    if not fork_server.serves(given):
        command = [sys.executable, *words]
        return subprocess.run(
            command, env=given, capture_output=True, text=True, timeout=timeout, check=False
        )
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = fork_server.start(_program, (words,), given, out, err)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(words, timeout)
        return subprocess.CompletedProcess(
            words, process.exitcode, out.read_text(), err.read_text()
        )


def _program(words: list[str]) -> None:
    flag, program, *rest = words
    sys.argv = [flag, *rest]
    if flag == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})


def assert_mistake(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """Assert exit code 2, an empty stdout and a single line on stderr that contains the words."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def loaded_after(code: str, *arguments: str) -> set[str]:
    """Return the names of the modules that a new interpreter has loaded after `code`."""
    script = f"import sys\n{code}\nprint('|'.join(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True
    )
    return set(result.stdout.strip().splitlines()[-1].split("|"))
