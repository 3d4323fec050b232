"""Parses YAML scalars exactly, including counts with units such as 10B, and formats values for messages."""

import math
import re
from fractions import Fraction

_NUMBER = re.compile(r"([+-]?(?:\d[\d_]*(?:\.[\d_]*)?|\.\d[\d_]*)(?:[eE][+-]?\d{1,3})?)")
_LONGEST_NUMBER = 100  # characters
_LONGEST_SHOWN = 80
_UNITS = {
    "": 1,
    "k": 10**3,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "B": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
}


def exact(value: object) -> Fraction | None:
    """The exact number that a scalar states; None if it states none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return Fraction(value)
    if isinstance(value, float):
        return Fraction(repr(value)) if math.isfinite(value) else None
    if isinstance(value, str) and len(value) < _LONGEST_NUMBER and _NUMBER.fullmatch(value.strip()):
        return Fraction(value.strip().replace("_", ""))
    return None


def counted(value: object) -> Fraction | None:
    """Like `exact`, but also reads counts with units, such as 10B, 500M and 64Ki."""
    match = None
    if isinstance(value, str):
        match = re.fullmatch(rf"{_NUMBER.pattern}\s*({'|'.join(_UNITS)})", value.strip())
    if match is None:
        return exact(value)
    number = exact(match[1])
    return None if number is None else number * _UNITS[match[2]]


def shown(value: object) -> str:
    """A value in YAML notation, shortened to fit in a message."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."
