"""Keys of a recipe: fields of pydantic dataclasses, which read YAML's scalars, and one line for
each mistake in them.
"""

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)

from gqa_convert.runtime.paths import expanded

T = TypeVar("T")

CONFIG = ConfigDict(extra="forbid")
"""Of all dataclasses of keys: unknown keys are mistakes."""
_GREATEST = 10**18
_KNOWN: list[str] = []
"""The names of all keys."""
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
    text = "null" if value is None else str(value)
    if isinstance(value, bool):
        text = text.lower()
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _read_count(value: Any) -> int:
    number = counted(value)
    if number is None or number.denominator != 1 or abs(number) > _GREATEST:
        raise ValueError("it must be a whole number such as 65536, 1e9, 10B or 500M")
    return int(number)


def _read_real(value: Any) -> float:
    number = exact(value)
    if number is None or abs(number) > 10**300:
        raise ValueError("it must be a number")
    return float(number)


def _check_text(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise ValueError("it must be text")
    return text


Tokens = Annotated[int, BeforeValidator(_read_count)]
"""A number of tokens, which may be written 10B, 500M or 64Ki."""
Whole = Tokens
Real = Annotated[float, BeforeValidator(_read_real)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True), AfterValidator(_check_text)]
PathText = Annotated[Text, AfterValidator(expanded)]
"""A path, in which `~` is the home folder, or a Hub id."""


def declared_in(file: Path) -> Callable[[type[T]], type[T]]:
    """A decorator that gives the fields of a class what a TOML file states in the section of the
    class: for each its `help`, whether it is `required` or else its `default` (None if there is
    none), bounds (`gt`, `ge`, `lt`, `le`), and when a resumed run may `change` it: never, if
    nothing is stated; if the `budget` does not shrink; always, since the trained weights do not
    depend on it (`bookkeeping`) or only rounding, memory and speed do (`execution`); or always,
    with a record of the change and its step (`recorded`).
    """
    stated = tomllib.loads(file.read_text(encoding="utf-8"))

    def complete(owner: type[T]) -> type[T]:
        _KNOWN.extend(stated[owner.__name__])
        for name, notes in stated[owner.__name__].items():
            unstated = ... if notes.pop("required", False) else None
            field = Field(
                notes.pop("default", unstated),
                description=notes.pop("help"),
                json_schema_extra={"change": notes.pop("change", "never")},
                validate_default=True,
                **notes,
            )
            setattr(owner, name, field)
        return owner

    return complete


def fields_of(declared: Any) -> dict[str, Any]:
    """pydantic's fields of a dataclass of keys, by name."""
    return declared.__pydantic_fields__  # type: ignore[no-any-return]


def read_keys(declared: type[T], values: Any) -> T:
    """A dataclass of keys from what YAML holds.

    Args:
        declared: the dataclass.
        values: a mapping, or an object of the dataclass.

    Raises:
        ValueError: a key is unknown, missing or not allowed; a line for each mistake.
    """
    try:
        return TypeAdapter(declared).validate_python(values)
    except ValidationError as problem:
        lines = map(_mistake, problem.errors())
        raise ValueError("\n".join(lines)) from None


def _mistake(error: Mapping[str, Any]) -> str:
    """The line for one of pydantic's errors."""
    path = ""
    for place in error["loc"]:
        path += f"[{place}]" if isinstance(place, int) else f".{place}"
    path = path.removeprefix(".")
    if error["type"] == "missing":
        return f"{path} is missing: add this key"
    if error["type"] == "unexpected_keyword_argument":
        near = difflib.get_close_matches(error["loc"][-1], _KNOWN, 1)
        advice = f"did you mean {near[0]!r}?" if near else "the documentation lists all keys"
        return f"{path} is an unknown key: {advice}"
    message = error["msg"].removeprefix("Value error, ").replace("Input should", "it must")
    message = message.replace("a valid boolean", "true or false")
    value = " ".join(shown(error["input"]).split())
    return f"{path} is {value or 'empty'}: {message}"
