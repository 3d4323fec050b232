"""How a declared JSON file is written and read: field types that name what is wrong, and the base of all declarations."""

import json
from collections.abc import Mapping
from typing import Annotated, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, ValidationInfo
from pydantic_core import PydanticCustomError

from gqa_convert.checkpoint.results import Result
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.errors import ReportError
from gqa_convert.measuring.results.fields import printable
from gqa_convert.measuring.results.kv_heads import KVHeads, one_or_each

FORMAT_VERSION = 1
"""The format version of the declared files."""
_LONGEST = 40
"""Characters of a wrong value that a message shows."""

_Model = TypeVar("_Model", bound=BaseModel)


def _wrong(expected: str) -> PydanticCustomError:
    return PydanticCustomError("wrong_type", "{expected}", {"expected": expected})


def _number(value: object, info: ValidationInfo) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e300:
        raise _wrong("a number")
    return float(value) if info.context else value  # a writer's int stays an int


def _count(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise _wrong("a count")
    return value


def _groups(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 62:
        raise _wrong("a number of K/V heads")
    return value


def _layer_groups(value: object) -> KVHeads:
    if not isinstance(value, list | tuple):
        return _groups(value)
    if not value:
        raise _wrong("a number of K/V heads, or a list with one for each layer,")
    return one_or_each(tuple(map(_groups, value)))


def _text(value: object, info: ValidationInfo) -> str | None:
    """A string; a reader also accepts any other value as its JSON, and escapes unprintable characters."""
    if value is None or info.context is None:
        return value if value is None or isinstance(value, str) else str(value)
    return printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _strings(value: object) -> object:
    if value is not None and not (isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)):
        raise _wrong("a list of strings")
    return value


Number = Annotated[int | float | None, BeforeValidator(_number)]
Count = Annotated[int | None, BeforeValidator(_count)]
Groups = Annotated[int, BeforeValidator(_groups)]
LayerGroups = Annotated[KVHeads, BeforeValidator(_layer_groups)]
"""A number of K/V heads, or a list with one for each layer."""
StatedGroups = Annotated[KVHeads | None, BeforeValidator(lambda value: None if value is None else _layer_groups(value))]
"""The same where it may be absent."""
Text = Annotated[str | None, BeforeValidator(_text)]
Strings = Annotated[tuple[str, ...] | None, BeforeValidator(_strings)]


class Stored(Result, BaseModel):
    """A JSON object that a command writes and another reads.

    The names of the fields are the keys in the file. A key that was not set by its writer is absent from the file.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=(), ser_json_inf_nan="constants")

    def as_json(self) -> JsonObject:
        """The object as plain data: the keys that were set, in the order of their declaration."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)

    @classmethod
    def read(cls, content: object, where: str) -> Self:
        """The declared part of a file's content.

        Args:
            content: of the file.
            where: what a message calls it.

        Raises:
            ReportError: a key has a value of the wrong type, or the file has another format version.
        """
        if isinstance(content, dict) and content.get("format_version") != FORMAT_VERSION:
            raise ReportError(
                f"{where} has format version {content.get('format_version')}, and this gqa-convert reads version "
                f"{FORMAT_VERSION}: use the version that wrote it, or write it again"
            )
        return checked(cls, content, where)


def checked(model: type[_Model], content: object, where: str) -> _Model:
    """The content of a file as a model.

    Raises:
        ReportError: a value has the wrong type.
    """
    try:
        return model.model_validate(content, context={"where": where})
    except ValidationError as problem:
        found = problem.errors(include_url=False)[0]
    *outer, key = [part for part in found["loc"] if not str(part).startswith("<")] or [""]
    if isinstance(key, int) and outer:
        *outer, name = outer
        key = f"{name}[{key}]"
    place = where
    for number, part in enumerate(outer):
        if isinstance(part, str):
            index = outer[number + 1] if number + 1 < len(outer) and isinstance(outer[number + 1], int) else None
            place = f"{part if index is None else f'{part}[{index}]'} of {place}"
    shown = json.dumps(found["input"], ensure_ascii=False, default=str)
    shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."
    expected = {"model_type": "an object", "tuple_type": "a list of objects", "dict_type": "an object"}
    wanted = expected.get(found["type"], found["msg"])
    if found["type"] == "missing":
        raise ReportError(f"{place} has no {key}: write the file again, or move it away")
    named = f"{key} of {place}" if key != "" else place
    raise ReportError(f"{named} is {shown} where {wanted} belongs: write the file again, or move it away")


def known_numbers(numbers: Mapping[str, float | None]) -> dict[str, float]:
    """The numbers that are not None, by printable names."""
    return {printable(name): value for name, value in numbers.items() if value is not None}
