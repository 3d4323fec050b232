"""Keys of a recipe, each declared once, as a field of a dataclass:

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Recipe:
        tokens: int | None = key("The training budget.", default=None, unit="tokens")

The declaration is the only place that states the type, the default, the unit, the allowed range and the help of a key.
Reading, error messages and the table in the documentation follow from it.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from gqa_convert.checkpoint.paths import expanded
from gqa_convert.errors import RecipeError
from gqa_convert.text.scalars import counted, exact, shown

Change = Literal["never", "budget", "bookkeeping", "execution", "recorded"]
"""When a resumed run may have another value: never; if the budget does not shrink; always, since the trained weights do
not depend on the key; always, since only rounding, memory and speed depend on it; or always, with a record of the change and its step."""

TOKENS = "tokens"
"""The unit of keys that may be written 10B, 500M or 64Ki."""
_GREATEST = 10**18
REQUIRED: Any = dataclasses.MISSING
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Key:
    """The declaration of one key.

    Attributes:
        name: of the field.
        hint: its type.
        default: its value where a recipe leaves it out; REQUIRED where it can't.
        help: what it means, in a sentence or two.
        unit: of a number.
        above, least, below, most: the bounds of a number.
        choices: the allowed values.
        path: whether a text is a path or a Hub id, in which `~` is the home folder.
        reader: reads a value that is no scalar, called with the key and the value.
        reads: the kind of value that the reader reads, for the documentation.
        aliases: what other programs call it.
        change: when a resumed run may have another value.
        needs_teacher: whether it makes sense with a teacher only.
    """

    name: str = ""
    hint: Any = None
    default: Any
    help: str
    unit: str = ""
    above: float = -math.inf
    least: float = -math.inf
    below: float = math.inf
    most: float = math.inf
    choices: tuple[str, ...] = ()
    path: bool = False
    reader: Callable[[str, Any], Any] | None = None
    reads: str = "sources"
    aliases: tuple[str, ...] = ()
    change: Change = "never"
    needs_teacher: bool = False

    @property
    def type(self) -> Any:
        """The type without None."""
        return (
            next((kind for kind in get_args(self.hint) if kind is not NoneType), None) if self.nullable else self.hint
        )

    @property
    def nullable(self) -> bool:
        """Whether null is a value."""
        return NoneType in get_args(self.hint)

    @property
    def kind(self) -> str:
        """The kind of value, for the documentation."""
        if self.reader is not None:
            return self.reads
        if get_origin(self.type) is tuple:
            return "list"
        if self.choices:
            return ", ".join(self.choices)
        plain = {str: "text", int: "whole number", float: "number", bool: "true or false"}[self.type]
        return plain + (f" of {self.unit}" if self.unit else "") + (f", {self.bounds}" if self.bounds else "")

    @property
    def bounds(self) -> str:
        """The range of a number, in words."""
        stated = [("above", self.above), ("at least", self.least), ("below", self.below), ("at most", self.most)]
        return " and ".join(f"{word} {bound:.10g}" for word, bound in stated if math.isfinite(bound))

    @property
    def shown_default(self) -> str:
        """The default, for the documentation."""
        if self.default is REQUIRED:
            return "required"
        if self.default is None or self.default == ():
            return "none"
        return f"{self.default:g}" if isinstance(self.default, float) else shown(self.default)

    def read(self, where: str, value: Any) -> Any:
        """A value from what YAML holds.

        Args:
            where: what a message calls the key.
            value: a scalar, or a list or mapping where the key has its own reader.

        Raises:
            RecipeError: it is not allowed.
        """
        if value is None and self.nullable:
            return None
        if self.reader is not None:
            return self.reader(where, value)
        if get_origin(self.type) is tuple:
            return self._read_list(where, value)
        if self.choices:
            return self._read_choice(where, value)
        if self.type is bool:
            if not isinstance(value, bool):
                raise RecipeError(f"{where} is {shown(value)}: it must be true or false")
            return value
        if self.type is int:
            return self._read_whole(where, value)
        if self.type is float:
            return self._read_real(where, value)
        return read_path(where, value) if self.path else read_text(where, value)

    def _read_whole(self, where: str, value: Any) -> int:
        number = counted(value) if self.unit == TOKENS else exact(value)
        least, most = 1 if self.least == -math.inf else int(self.least), int(min(self.most, _GREATEST))
        if number is None or number.denominator != 1:
            example = " such as 65536, 1e9, 10B or 500M" if self.unit == TOKENS else ""
            raise RecipeError(f"{where} is {shown(value)}: it must be a whole number{example}")
        if not least <= number <= most:
            limit = f" and at most {most}" if number > most else ""
            raise RecipeError(f"{where} is {shown(value)}: it must be at least {least}{limit}")
        return int(number)

    def _read_real(self, where: str, value: Any) -> float:
        found = exact(value)
        number = math.nan if found is None or abs(found) > 10**300 else float(found)
        if not (self.above < number < self.below and self.least <= number <= self.most):
            raise RecipeError(f"{where} is {shown(value)}: it must be a number {self.bounds}")
        return number

    def _read_choice(self, where: str, value: Any) -> str:
        if value not in self.choices:
            choices = (*self.choices, "null") if len(self.choices) == 1 else self.choices
            allowed = f"{', '.join(choices[:-1])} or {choices[-1]}"
            raise RecipeError(f"{where} is {shown(value)}: it must be {allowed}")
        return str(value)

    def _read_list(self, where: str, value: Any) -> tuple[str, ...]:
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list | tuple):
            example = self.choices[0] if self.choices else "first, second"
            raise RecipeError(f"{where} is {shown(value)}: it must be a list such as [{example}]")
        if not self.choices:
            return tuple(read_text(f"{where}[{number}]", name) for number, name in enumerate(names))
        for name in names:
            if name not in self.choices:
                raise RecipeError(f"{where} names {shown(name)}: the {where} are {', '.join(self.choices)}")
        for name in names:
            if names.count(name) > 1:
                raise RecipeError(f"{where} names {name} twice: name each once")
        return tuple(names)


def key(
    help: str,  # noqa: A002  # as argparse and typer call it
    *,
    default: Any = REQUIRED,
    **declared: Any,
) -> Any:
    """A field of a dataclass, declared as a key.

    Args:
        help: what it means.
        default: its value where a recipe leaves it out.
        declared: further attributes of `Key`.
    """
    return dataclasses.field(
        default=default, metadata={"key": Key(default=default, help=" ".join(help.split()), **declared)}
    )


@cache
def keys_of(declared: type) -> dict[str, Key]:
    """The keys that a dataclass declares, in their order."""
    hints = get_type_hints(declared)
    found = {}
    for field in dataclasses.fields(declared):
        stated: Key = field.metadata["key"]
        hint = hints[field.name]
        literal = get_args(hint) if get_origin(hint) is Literal else ()
        found[field.name] = replace(stated, name=field.name, hint=hint, choices=stated.choices or literal)
    return found


def read_keys(declared: type, values: Mapping[Any, Any], owner: str = "") -> dict[str, Any]:
    """The values of a dataclass's keys from plain data.

    Args:
        declared: the dataclass.
        values: what YAML holds.
        owner: the key that holds the mapping, such as `data[0]`; empty for a whole recipe.

    Raises:
        RecipeError: a key is unknown, or its value is not allowed.
    """
    keys = keys_of(declared)
    for name in values:
        if name not in keys:
            subject = f"{owner} has an unknown key" if owner else "unknown key"
            raise RecipeError(f"{subject} {_quoted(name)}: {suggestion(name, declared)}")
    prefix = f"{owner}." if owner else ""
    return {name: keys[name].read(f"{prefix}{name}", value) for name, value in values.items()}


def read_mapping(declared: type[T], where: str, value: Any, example: str) -> T:
    """A dataclass of keys from the mapping that is the value of another key.

    Args:
        declared: the dataclass; a value of this type is returned unchanged.
        where: the key that holds the mapping.
        value: what YAML holds.
        example: of a mapping, for the message.

    Raises:
        RecipeError: the value is no mapping, or a key of it is unknown or not allowed.
    """
    if isinstance(value, declared):
        return value
    if not isinstance(value, Mapping):
        raise RecipeError(f"{where} is {shown(value)}: it must be a mapping such as {example}")
    return declared(**read_keys(declared, value, where))


def suggestion(name: object, declared: type) -> str:
    """Advice about an unknown key: the nearest known one, or all of them."""
    keys = keys_of(declared)
    if isinstance(name, str):
        bare = name.lower().strip().lstrip("-").replace("-", "_")
        meant = [known for known, each in keys.items() if bare in each.aliases]
        if near := meant or difflib.get_close_matches(bare, keys, 1):
            return f"did you mean {near[0]!r}?"
    return f"the keys are {', '.join(keys)}"


def keys_table(declared: type) -> str:
    """The keys of a dataclass as a Markdown table."""
    rows = [
        f"| `{each.name}` | {each.kind} | {each.shown_default} | {each.help} |" for each in keys_of(declared).values()
    ]
    return "\n".join(["| key | kind | default | meaning |", "|---|---|---|---|", *rows])


def read_text(where: str, value: Any) -> str:
    """Text that is not empty and can be encoded.

    Raises:
        RecipeError: it is not.
    """
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise RecipeError(f"{where} is {shown(value) or 'empty'}: it must be text")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise RecipeError(f"{where} is {shown(value)}, which is no UTF-8: rename the file or folder")
    return value


def read_path(where: str, value: Any) -> str:
    """A path, in which `~` is the home folder, or a Hub id.

    Raises:
        RecipeError: it is neither.
    """
    return expanded(read_text(where, value))


def _quoted(name: object) -> str:
    return repr(name) if isinstance(name, str) else shown(name)
