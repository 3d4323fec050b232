"""JSON that must mean one thing only: no duplicate keys, the expected top-level type, errors that name the file."""

import codecs
import json
from collections.abc import Callable
from typing import Any

from gqa_convert.errors import CorruptCheckpointError, GQAConvertError


class _DuplicateKeyError(ValueError):
    pass


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(f"the key {key!r} occurs twice")
            seen.add(key)
    return result


def parse_object(
    raw: bytes,
    where: str,
    error: type[GQAConvertError] = CorruptCheckpointError,
    parse_int: Callable[[str], int] | None = None,
) -> dict[str, Any]:
    """The JSON object in `raw`.

    Args:
        raw: UTF-8 text.
        where: what to call the file in an error message.
        error: the class to raise.
        parse_int: turns a number's digits into an integer, or raises ValueError.

    Raises:
        error: the text is no UTF-8, no JSON, no object, nested too deeply, or repeats a key.
    """
    if raw.startswith(codecs.BOM_UTF8):
        raise error(
            f"{where} begins with a byte order mark, with which transformers can't read it: save it as UTF-8 without the mark"
        )
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys, parse_int=parse_int)
    except (ValueError, RecursionError) as problem:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise error(f"{where} is not valid JSON ({problem}): download or copy the file again") from None
    if not isinstance(value, dict):
        raise error(
            f"{where} holds a JSON {type(value).__name__} where an object belongs: download or copy the file again"
        )
    return value
