"""Parses YAML scalars exactly, including counts with units such as 10B, and formats values for messages."""

import re
from fractions import Fraction

_NUMBER = re.compile(r"([+-]?(?:\d[\d_]*(?:\.[\d_]*)?|\.\d[\d_]*)(?:[eE][+-]?\d{1,3})?)")
_LONGEST = 80
"""Characters of a number, and of a value in a message."""
_UNITS = {
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "k": 1_000,
    "K": 1_000,
    "M": 1_000_000,
    "G": 1_000_000_000,
    "B": 1_000_000_000,
    "T": 1_000_000_000_000,
}


def exact(value: object) -> Fraction | None:
    """The exact number that a scalar states; None if it states none."""
    text = str(value).strip()
    if len(text) > _LONGEST or not _NUMBER.fullmatch(text):
        return None
    return Fraction(text.replace("_", ""))


def counted(value: object) -> Fraction | None:
    """Like `exact`, but also reads counts with units, such as 10B, 500M and 64Ki."""
    text = str(value).rstrip()
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    number = exact(text.removesuffix(unit))
    return number and number * _UNITS.get(unit, 1)


def shown(value: object) -> str:
    """A value in YAML notation, shortened to fit in a message."""
    text = (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
