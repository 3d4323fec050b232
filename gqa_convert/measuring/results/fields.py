"""Strict JSON, and names from files that may hold anything."""

import json
import math
from pathlib import Path
from typing import Any, Never

from gqa_convert.errors import ReportError


def printable(text: str) -> str:
    """The text with every unprintable character escaped: names from files may hold control characters."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def is_there(path: Path) -> bool:
    """Whether the file or folder exists; False also for a name that no file system accepts."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def parse_json(path: Path) -> Any:
    """The JSON of a file.

    Raises:
        ReportError: the file can't be read or is not JSON, in which NaN, Infinity and numbers beyond a float do not
            exist.
    """
    try:
        raw = path.read_bytes()
    except OSError as problem:
        raise ReportError(
            f"{path} can't be read ({problem.strerror}): make it readable, or name other folders"
        ) from None
    try:
        return json.loads(raw.decode("utf-8"), parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError) as problem:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ReportError(f"{path} is not valid JSON ({problem}): write it again, or move it away") from None


def _no_number(name: str) -> Never:
    raise ValueError(f"it holds {name}")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"it holds {digits[:20]}")
    return number
