"""Read the index of a sharded checkpoint, whose map of tensors to files may be long."""

import re
import sys

from gqa_convert.checkpoint.strict_json import JsonObject, parse_object
from gqa_convert.errors import CorruptCheckpointError

_KEY = '"weight_map"'
_BEGINNING = re.compile(_KEY + r"[ \t\n\r]*:[ \t\n\r]*\{")
_TEXT = r'[ \t\n\r]*"([^"\\\x00-\x1f]*)"[ \t\n\r]*'
_PAIR = re.compile(f"{_TEXT}:{_TEXT}([,}}])")


def parse_index(raw: bytes, where: str) -> JsonObject:
    """Parse an index as `parse_object` does. Its `weight_map` holds one object for each file's name.

    Args:
        raw: UTF-8 text.
        where: the name of the file in error messages.

    Raises:
        CorruptCheckpointError: as of `parse_object`.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return parse_object(raw, where)  # raises
    del raw
    found = _parse_long(text, where)
    if found is not None:
        return found
    index = parse_object(text.encode(), where)
    weight_map = index.get("weight_map")
    if isinstance(weight_map, dict):
        index["weight_map"] = {
            name: sys.intern(file) if isinstance(file, str) else file for name, file in weight_map.items()
        }
    return index


def _parse_long(text: str, where: str) -> JsonObject | None:
    """Parse an index pair by pair, in a fraction of the memory; None for one that is not written as usual, or damaged."""
    beginning = _BEGINNING.search(text)
    if beginning is None or text.count(_KEY) != 1:
        return None
    weight_map: dict[str, str] = {}
    count, end, separator = 0, beginning.end(), ","
    while separator == ",":
        pair = _PAIR.match(text, end)
        if pair is None:
            return None
        name, file, separator = pair.groups()
        weight_map[name] = sys.intern(file)
        count, end = count + 1, pair.end()
    if count != len(weight_map):
        return None
    try:
        index = parse_object(f"{text[: beginning.end()]}}}{text[end:]}".encode(), where)
    except CorruptCheckpointError:
        return None
    if index.get("weight_map") != {}:  # the map was in another object
        return None
    return index | {"weight_map": weight_map}
