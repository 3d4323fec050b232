"""JSON objects: read from files, where everything else is an error that names the file, and made of
results.
"""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from gqa_convert.errors import CorruptCheckpointError, GQAConvertError

JsonObject = dict[str, Any]
"""A JSON object, as `json.loads` returns it and `json.dumps` takes it."""

Config = Mapping[str, Any]
"""The content of a config.json that somebody else wrote."""


def parse_object(
    raw: bytes, where: str, error: type[GQAConvertError] = CorruptCheckpointError
) -> JsonObject:
    """Parse the JSON object in `raw`.

    Args:
        raw: UTF-8 text.
        where: the name of the file in error messages.
        error: the exception class to raise.

    Raises:
        error: the text is not UTF-8, not JSON, not an object, or nested too deeply.
    """
    try:
        value = json.loads(raw.decode("utf-8"))
    except (
        ValueError,
        RecursionError,
    ) as problem:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise error(
            f"{where} is not valid JSON ({problem}): download or copy the file again"
        ) from None
    if not isinstance(value, dict):
        raise error(
            f"{where} holds a JSON {type(value).__name__} instead of an object: copy the file again"
        )
    return value


_PLAIN: TypeAdapter[Any] = TypeAdapter(Any, config={"ser_json_inf_nan": "constants"})
"""Numbers that are not finite stay as they are."""


def plain(value: Any) -> Any:
    """Turn dataclasses and mappings into dictionaries, sequences into lists, all the way down."""
    return _PLAIN.dump_python(value, mode="json", fallback=dict)


class Result:
    """A result with named attributes and a JSON form, which `--json` prints."""

    __slots__ = ()

    def as_json(self) -> JsonObject:
        """The result as plain data."""
        return plain(self)  # type: ignore[no-any-return]
