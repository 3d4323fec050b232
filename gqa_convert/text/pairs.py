"""Pairs of texts, one for the encoder and one for the decoder to predict, from two fields of each row of a data source."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from gqa_convert.errors import DataError
from gqa_convert.text.documents import PAIR_KEYS, well_formed
from gqa_convert.text.hub_rows import HubText, numbered_rows
from gqa_convert.text.text_files import FileText


class Pair(NamedTuple):
    """Two texts; either may be empty."""

    source: str
    target: str


def pairs_of(text: FileText | HubText, fields: tuple[str, str]) -> Iterator[tuple[str, Pair]]:
    """The location of each row, for messages, and its pair.

    Args:
        text: JSON lines, Parquet files or a Hub dataset.
        fields: the field of the source texts and the field of the targets. `translation.en` is the field `en` of the
            object in `translation`, unless a field has that full name.

    Raises:
        DataError: the rows can't be read, lack a field, or hold something other than text in it.
    """
    rows = numbered_rows(text, fields) if isinstance(text, HubText) else text.rows(fields)
    for where, row in rows:
        yield where, Pair(_text(row, fields[0], where), _text(row, fields[1], where))


def _text(row: Mapping[str, Any], field: str, where: str) -> str:
    value = _value(row, field, where)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(
            f"{where}: {field!r} holds a {type(value).__name__}, expected text: name another field with {PAIR_KEYS}"
        )
    return well_formed(value)


def _value(row: Mapping[str, Any], field: str, where: str) -> Any:
    if field in row:
        return row[field]
    outer, _, inner = field.partition(".")
    within = row.get(outer)
    if inner and isinstance(within, Mapping):
        return _value(within, inner, f"{where}: {outer!r}")
    found = ", ".join(map(str, list(row)[:20])) or "nothing"
    raise DataError(f"{where} has no {field!r}, found {found}: name the fields with {PAIR_KEYS}")
