"""The base of what the functions behind the commands return."""

from typing import Any

from pydantic_core import to_jsonable_python

from gqa_convert.checkpoint.strict_json import JsonObject


def plain(value: Any) -> Any:
    """Turn dataclasses and mappings into dictionaries, and sequences into lists, all the way down."""
    return to_jsonable_python(value, fallback=dict)


class Result:
    """A result with named attributes and a JSON form, which `--json` prints."""

    __slots__ = ()

    def as_json(self) -> JsonObject:
        """The result as plain data."""
        return plain(self)  # type: ignore[no-any-return]
