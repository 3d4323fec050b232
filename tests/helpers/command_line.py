"""Runs the program, or Python, in another process."""

import functools
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.helpers.fork_server import SMALL, ForkServer, libraries_for

COMMAND = [sys.executable, "-m", "gqa_convert"]


@functools.cache
def server(libraries: tuple[str, ...]) -> ForkServer:
    """Return a server of this test process, which starts at its first use."""
    return ForkServer(libraries)


def run(*arguments: str | Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run `gqa-convert ARGUMENTS` in another process and return its exit code and output."""
    return run_python("-m", "gqa_convert", *arguments, timeout=timeout)


def run_python(
    *arguments: str | Path,
    timeout: float = 120,
    environment: Mapping[str, str] | None = None,
    models: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS`, which begin with `-m MODULE` or `-c CODE`, in a fork of a process that imported the large
    libraries.

    That process lacks torch and the client of the Hub where the environment has other variables of the Hub than the
    suite. It is a new interpreter where any other variable differs that a library may read while it is imported.

    Args:
        arguments: what follows `python`.
        timeout: the seconds after which the program is killed.
        environment: the program's variables; by default those of this process.
        models: whether the program loads models. If not, it runs in a fork of the process without torch, which is
            smaller, and so are forks that the program makes.
    """
    words = [str(argument) for argument in arguments]
    given = os.environ if environment is None else environment
    libraries = libraries_for(given)
    if libraries is not None and not models:
        libraries = SMALL
    if libraries is not None:
        return server(libraries).run(words, given, timeout)
    command = [sys.executable, *words]
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=timeout, check=False)


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
    result = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    return set(result.stdout.strip().splitlines()[-1].split("|"))
