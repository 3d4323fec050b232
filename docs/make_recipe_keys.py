"""Writes the tables of recipe keys in uptraining-reference.md from the keys' declarations. With --check: says whether they are
up to date.
"""

import re
import sys
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from gqa_convert.data.keys import fields_of
from gqa_convert.data.scalars import shown
from gqa_convert.data.sources import Source
from gqa_convert.training.recipe import Lora, Recipe

DOCUMENT = Path(__file__).with_name("uptraining-reference.md")
_KINDS = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false", "array": "list"}
_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


def updated(page: str) -> str:
    """The page with the tables as the declarations have them."""
    for first, declared in (("model", Recipe), ("source", Source), ("rank", Lora)):
        table = re.compile(rf"^\| key \|[^\n]*\n\|[-|]+\|\n\| `{first}` \|.*?(?=\n\n)", re.DOTALL | re.MULTILINE)
        assert len(table.findall(page)) == 1, f"{DOCUMENT} has no table whose first key is {first}"
        page = table.sub(lambda _: keys_table(declared), page)  # noqa: B023
    return page


def keys_table(declared: Any) -> str:
    """The keys of a dataclass as a Markdown table."""
    schema = TypeAdapter(declared).json_schema()
    rows = ["| key | kind | default | meaning |", "|---|---|---|---|"]
    for name, field in fields_of(declared).items():
        stated = schema["properties"][name]
        default = "required"
        if not field.is_required():
            default = "none" if field.default in (None, ()) else shown(field.default)
            if isinstance(field.default, float):
                default = f"{field.default:g}"
        rows.append(f"| `{name}` | {_kind(field, stated)} | {default} | {field.description} |")
    return "\n".join(rows)


def _kind(field: Any, stated: Any) -> str:
    """The kind of value of a field, whose JSON schema is stated, in words."""
    while "anyOf" in stated:
        kinds = [each for each in stated["anyOf"] if each.get("type") != "null"]
        if any(each.get("type") == "array" for each in kinds):
            several = f"one or a list of {_kind(field, kinds[0])}"
            return "sources" if any("$ref" in each for each in kinds) else several
        stated = kinds[0]
    if "enum" in stated or "const" in stated:
        return ", ".join(map(str, stated.get("enum", [stated.get("const")])))
    if "$ref" in stated:
        return "mapping"
    bounds = []
    for limit in field.metadata:
        for name, word in _BOUNDS.items():
            if hasattr(limit, name):
                bounds.append(f"{word} {getattr(limit, name):.10g}")
    return ", ".join([_KINDS[stated["type"]], *([" and ".join(bounds)] if bounds else [])])


if __name__ == "__main__":
    page = DOCUMENT.read_text(encoding="utf-8")
    if "--check" in sys.argv:
        sys.exit(None if updated(page) == page else f"{DOCUMENT} is out of date: run docs/make_recipe_keys.py")
    DOCUMENT.write_text(updated(page), encoding="utf-8")
