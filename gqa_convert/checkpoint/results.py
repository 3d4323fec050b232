"""The base of what the functions behind the commands return."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from gqa_convert.checkpoint.strict_json import JsonObject


def plain(value: Any) -> Any:
    """Turn dataclasses and mappings into dictionaries, and sequences into lists, all the way down."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


class Result:
    """A result with named attributes and a JSON form, which `--json` prints."""

    __slots__ = ()

    def as_json(self) -> JsonObject:
        """The result as plain data."""
        return plain(self)  # type: ignore[no-any-return]
