"""Keys of a recipe: fields of pydantic dataclasses, which read YAML's scalars, and one line for each mistake in them."""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from gqa_convert.checkpoint.paths import expanded
from gqa_convert.data.scalars import counted, exact, shown

Change = Literal["never", "budget", "bookkeeping", "execution", "recorded"]
"""When a resumed run may have another value: never; if the budget does not shrink; always, since the trained weights do
not depend on the key; always, since only rounding, memory and speed depend on it; or always, with a record of the change
and its step."""

CONFIG = ConfigDict(extra="forbid")
"""Of all dataclasses of keys: unknown keys are mistakes."""
_GREATEST = 10**18


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
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError("it is no UTF-8: rename the file or folder")
    return text


Tokens = Annotated[int, BeforeValidator(_read_count, json_schema_input_type=int | str)]
"""A number of tokens, which may be written 10B, 500M or 64Ki."""
Whole = Annotated[int, BeforeValidator(_read_count, json_schema_input_type=int)]
Real = Annotated[float, BeforeValidator(_read_real, json_schema_input_type=float)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True), AfterValidator(_check_text)]
PathText = Annotated[Text, AfterValidator(expanded)]
"""A path, in which `~` is the home folder, or a Hub id."""


def key(
    help: str,  # noqa: A002  # as argparse and typer call it
    *,
    default: Any = ...,
    aliases: tuple[str, ...] = (),
    change: Change = "never",
    **bounds: Any,
) -> Any:
    """A field of a dataclass of keys.

    Args:
        help: what it means.
        default: its value where a recipe leaves it out.
        aliases: what other programs call it, to suggest the name.
        change: when a resumed run may have another value.
        bounds: `gt`, `ge`, `lt` and `le` of a number.
    """
    notes: dict[str, Any] = {"change": change}
    if aliases:
        notes["aliases"] = list(aliases)
    return Field(default, description=help, json_schema_extra=notes, **bounds)


def fields_of(declared: Any) -> dict[str, Any]:
    """pydantic's fields of a dataclass of keys, by name."""
    return declared.__pydantic_fields__  # type: ignore[no-any-return]


def read_keys(declared: Any, values: Any, nested: Mapping[str, Any], owner: str = "") -> Any:
    """A dataclass of keys from what YAML holds.

    Args:
        declared: the dataclass.
        values: a mapping, or an object of the dataclass.
        nested: the dataclasses of keys that hold mappings, by key.
        owner: what the values are called in messages; empty for a whole recipe.

    Raises:
        ValueError: a key is unknown, missing or not allowed; a line for each mistake.
    """
    try:
        return TypeAdapter(declared).validate_python(values)
    except ValidationError as problem:
        lines, misspelt = [], set()
        mistakes = problem.errors(include_url=False)
        for error in sorted(mistakes, key=lambda error: error["type"] == "missing"):
            *outer, name = error["loc"]
            above = _path(outer, values, owner)
            holder = nested.get(str(outer[0]), declared) if outer else declared
            if error["type"] == "unexpected_keyword_argument":
                misspelt.add((above, _nearest(name, holder)))
                subject = f"{above} has an unknown key" if above else "unknown key"
                lines.append(f"{subject} {name!r}: {suggestion(name, holder)}")
            elif error["type"] != "missing":
                lines.append(f"{_path(error['loc'], values, owner)} is {_explained(error)}")
            elif (above, name) not in misspelt:
                meaning = re.split(r"[:;.(]", fields_of(holder)[str(name)].description)[0].strip()
                lines.append(f"{above or 'the recipe'} has no key {name!r}: give {meaning[0].lower()}{meaning[1:]}")
        raise ValueError("\n".join(dict.fromkeys(" ".join(line.split()) for line in lines))) from None


def _path(location: Sequence[int | str], values: Any, path: str) -> str:
    """The path of a key, in which an item of a list has a number; a value that stands alone for a list has none."""
    for place in location:
        if isinstance(place, str):
            path += f".{place}" if path else place
            values = values.get(place) if isinstance(values, Mapping) else values
        elif isinstance(values, list | tuple):
            path += f"[{place}]"
            values = values[place]
    return path


def _explained(error: Any) -> str:
    """A value that is not allowed, and what it must be."""
    message = str(error["msg"]).removeprefix("Value error, ").replace("Input should be", "it must be").replace("'", "")
    if error["type"] == "dataclass_type":
        message = "it must be a mapping"
    for theirs, ours in (("a valid string", "text"), ("a valid boolean", "true or false"), ("a valid tuple", "a list")):
        message = message.replace(theirs, ours)
    return f"{shown(error['input']) or 'empty'}: {message}"


def suggestion(name: object, declared: Any) -> str:
    """Advice about an unknown key: the nearest known one, or all of them."""
    near = _nearest(name, declared)
    return f"did you mean {near!r}?" if near else f"the keys are {', '.join(fields_of(declared))}"


def _nearest(name: object, declared: Any) -> str | None:
    """The key that is meant, as other programs call it or misspelt."""
    bare = str(name).lower().strip().lstrip("-").replace("-", "_")
    for known, each in fields_of(declared).items():
        if bare in each.json_schema_extra.get("aliases", ()):
            return known
    return next(iter(difflib.get_close_matches(bare, fields_of(declared), 1)), None)


def schema_text(declared: Any) -> str:
    """The JSON schema of a dataclass of keys."""
    return json.dumps(TypeAdapter(declared).json_schema(), indent=2)
