"""Writes the tables of recipe keys in uptraining-reference.md from the keys' declarations. With
--check: says whether they are up to date.
"""

import re
import sys
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from gqa_convert.data.keys import fields_of, shown
from gqa_convert.data.sources import Source
from gqa_convert.training.recipe import Lora, Recipe

DOCUMENT = Path(__file__).with_name("uptraining-reference.md")


def updated(page: str) -> str:
    """The page with the tables as the declarations have them."""
    for first, declared in (("model", Recipe), ("source", Source), ("rank", Lora)):
        table = re.compile(
            rf"^\| key \|[^\n]*\n\|[-|]+\|\n\| `{first}` \|.*?(?=\n\n)", re.DOTALL | re.MULTILINE
        )
        assert len(table.findall(page)) == 1, f"{DOCUMENT} has no table whose first key is {first}"
        page = table.sub(lambda _: keys_table(declared), page)  # noqa: B023
    return page


def keys_table(declared: Any) -> str:
    """The keys of a dataclass as a Markdown table."""
    schema = TypeAdapter(declared).json_schema()
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in fields_of(declared).items():
        default = "required"
        if not field.is_required():
            default = "none" if field.default in (None, []) else shown(field.default)
            if isinstance(field.default, float):
                default = f"{field.default:g}"
        choices = find_choices(schema["properties"][name])
        added = f" One of {', '.join(choices)}." if choices else ""
        rows.append(f"| `{name}` | {default} | {field.description}{added} |")
    return "\n".join(rows)


def find_choices(stated: Any) -> list[str]:
    """The words that a key may have, by its JSON schema; none where it takes other values."""
    for kind in stated.get("anyOf", ()):
        found = find_choices(kind)
        if found:
            return found
    return [str(choice) for choice in stated.get("items", stated).get("enum", ())]


if __name__ == "__main__":
    page = DOCUMENT.read_text(encoding="utf-8")
    if "--check" in sys.argv:
        sys.exit(
            None
            if updated(page) == page
            else f"{DOCUMENT} is out of date: run docs/make_recipe_keys.py"
        )
    DOCUMENT.write_text(updated(page), encoding="utf-8")
