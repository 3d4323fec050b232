"""The base of what the functions behind the commands return."""

from typing import Any

from pydantic import TypeAdapter

from gqa_convert.checkpoint.strict_json import JsonObject

_PLAIN: TypeAdapter[Any] = TypeAdapter(Any, config={"ser_json_inf_nan": "constants"})
"""Numbers that are not finite stay as they are."""


def plain(value: Any) -> Any:
    """Turn dataclasses and mappings into dictionaries, and sequences into lists, all the way down."""
    return _PLAIN.dump_python(value, mode="json", fallback=dict)


class Result:
    """A result with named attributes and a JSON form, which `--json` prints."""

    __slots__ = ()

    def as_json(self) -> JsonObject:
        """The result as plain data."""
        return plain(self)  # type: ignore[no-any-return]
