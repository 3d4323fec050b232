"""Compares JSON values, and JSON objects key by key."""

import json
from typing import Any

from gqa_convert.verify.report import Failure


def same_json(a: Any, b: Any) -> bool:
    """Whether two values are the same in JSON, where 1, 1.0 and true differ."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def check_same_object(name: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare two JSON objects.

    Args:
        name: the file's name, for messages.
        found: OUT's object.
        expected: the object that OUT must have.

    Raises:
        Failure: a key is missing, is extra or has another value.
    """
    for key in sorted(found.keys() | expected.keys()):
        if key not in found:
            raise Failure(f"{name} lacks {key}, expected {expected[key]!r}")
        if key not in expected:
            raise Failure(f"{name} has {key} = {found[key]!r}, which SOURCE does not have")
        if not same_json(found[key], expected[key]):
            raise Failure(f"{name} has {key} = {found[key]!r}, expected {expected[key]!r}")
