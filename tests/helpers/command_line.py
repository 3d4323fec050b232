"""Runs the program, or Python, in another process."""

import subprocess
import sys
from pathlib import Path

COMMAND = [sys.executable, "-m", "gqa_convert"]


def run(*arguments: str | Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run `gqa-convert ARGUMENTS` and return its exit code and output."""
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


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
