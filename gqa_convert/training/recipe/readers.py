"""From a YAML scalar to a value: each reader takes a key's name, for messages, and what was given, and returns the
value.
"""

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, get_args

from gqa_convert.checkpoint.paths import expanded
from gqa_convert.errors import RecipeError

Reader = Callable[[str, Any], Any]
_NUMBER = re.compile(r"([+-]?(?:\d[\d_]*(?:\.[\d_]*)?|\.\d[\d_]*)(?:[eE][+-]?\d{1,3})?)")
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
    """The number that a scalar says, exactly; None if it says none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return Fraction(value)
    if isinstance(value, float):
        return Fraction(repr(value)) if math.isfinite(value) else None
    if isinstance(value, str) and len(value) < 100 and _NUMBER.fullmatch(value.strip()):
        return Fraction(value.strip().replace("_", ""))
    return None


def counted(value: object) -> Fraction | None:
    """The same, where 10B, 500M and 64k are numbers too."""
    match = (
        re.fullmatch(rf"{_NUMBER.pattern}\s*({'|'.join(_UNITS)})", value.strip()) if isinstance(value, str) else None
    )
    number = exact(match[1]) if match else exact(value)
    return number * _UNITS[match[2]] if match and number is not None else number


def whole(least: int = 1, most: int = 10**18, units: bool = False) -> Reader:
    def read(key: str, value: Any) -> int:
        number = counted(value) if units else exact(value)
        wanted = "a whole number" + (" such as 65536, 1e9, 10B or 500M" if units else "")
        if number is None or number.denominator != 1:
            raise RecipeError(f"{key} is {shown(value)}: it must be {wanted}")
        if not least <= number <= most:
            raise RecipeError(
                f"{key} is {shown(value)}: it must be at least {least}"
                + (f" and at most {most}" if number > most else "")
            )
        return int(number)

    return read


def real(above: float = -math.inf, least: float = -math.inf, below: float = math.inf, most: float = math.inf) -> Reader:
    bounds = [f"above {above:g}"] * (above > -math.inf) + [f"at least {least:g}"] * (least > -math.inf)
    bounds += [f"below {below:g}"] * (below < math.inf) + [f"at most {most:g}"] * (most < math.inf)

    def read(key: str, value: Any) -> float:
        found = exact(value)
        number = math.nan if found is None or abs(found) > 10**300 else float(found)
        if not (above < number < below and least <= number <= most):
            raise RecipeError(f"{key} is {shown(value)}: it must be a number {' and '.join(bounds)}")
        return number

    return read


def boolean(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise RecipeError(f"{key} is {shown(value)}: it must be true or false")
    return value


def text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise RecipeError(f"{key} is {shown(value) or 'empty'}: it must be text")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise RecipeError(f"{key} is {shown(value)}, which is no UTF-8: rename the file or folder")
    return value


def place(key: str, value: Any) -> str:
    """A path, where `~` is the home folder, or a Hub id."""
    given = text(key, value)
    return expanded(given)


def choice(of: Any) -> Reader:
    choices = get_args(of)

    def read(key: str, value: Any) -> str:
        if value not in choices:
            raise RecipeError(f"{key} is {shown(value)}: it must be {', '.join(choices[:-1])} or {choices[-1]}")
        return str(value)

    return read


def or_none(reader: Reader) -> Reader:
    return lambda key, value: None if value is None else reader(key, value)


def shown(value: object) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
