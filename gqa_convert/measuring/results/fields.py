"""JSON files taken at their word and no further: a field is absent, or of its type, or a mistake that is named."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Never

from gqa_convert.errors import ReportError


def printable(text: str) -> str:
    """The text with everything escaped that is no character to look at: names come from files that nobody vouches
    for.
    """
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def told_apart(paths: Iterable[Path]) -> dict[Path, str]:
    """The shortest ends of different paths that are all different."""
    places = list(paths)
    depth = next(
        (depth for depth in range(1, 100) if len({place.parts[-depth:] for place in places}) == len(places)), 100
    )
    return {place: "/".join(place.parts[-depth:]) for place in places}


def is_there(path: Path) -> bool:
    """Whether there is such a file or folder; a name from a file need not even be one that a system takes."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def parse_json(path: Path) -> Any:
    """The JSON of a file.

    Raises:
        ReportError: it can't be read, or is no JSON; NaN and Infinity are none, nor are numbers that no float can hold.
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


class Fields:
    """A JSON object whose fields are optional and, where present and not null, must have the type that is asked for.

    Args:
        record: the object.
        where: what to call it in an error message.
    """

    def __init__(self, record: dict[str, Any], where: str) -> None:
        self.record, self.where = record, where

    def number(self, key: str) -> float | None:
        value = self.record.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e300:
            self._refuse(key, value, "a number")
        return float(value)

    def count(self, key: str) -> int | None:
        value = self.record.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
            self._refuse(key, value, "a count")
        return int(value)

    def text(self, key: str) -> str | None:
        """A string, and anything else as its JSON."""
        value = self.record.get(key)
        if value is None:
            return None
        return printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))

    def strings(self, key: str) -> list[str] | None:
        value = self.record.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            self._refuse(key, value, "a list of strings")
        return [str(each) for each in value]

    def part(self, key: str) -> "Fields | None":
        value = self.record.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self._refuse(key, value, "an object")
        return Fields(value, f"{key} of {self.where}")

    def parts(self, key: str) -> "list[Fields]":
        value = self.record.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            self._refuse(key, value, "a list of objects")
        return [Fields(each, f"{key}[{number}] of {self.where}") for number, each in enumerate(value)]

    def numbers(self, key: str) -> dict[str, float]:
        """An object of numbers."""
        part = self.part(key)
        found = {} if part is None else {name: part.number(name) for name in part.record}
        return {printable(name): value for name, value in found.items() if value is not None}

    def need_groups(self) -> int:
        """`groups`, which nothing can be said without."""
        groups = self.count("groups")
        if not groups:
            self._refuse("groups", self.record.get("groups"), "a number of K/V heads")
        return groups

    def _refuse(self, key: str, value: Any, expected: str) -> Never:
        shown = json.dumps(value, ensure_ascii=False)
        shown = shown if len(shown) <= 40 else f"{shown[:40]}..."
        raise ReportError(
            f"{key} of {self.where} is {shown} where {expected} belongs: write the file again, or move it away"
        )
