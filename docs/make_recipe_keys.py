"""Writes the tables of recipe keys in uptraining.md from the keys' declarations. With --check: says whether they are
up to date.
"""

import re
import sys
from pathlib import Path

from gqa_convert.data.keys import keys_table
from gqa_convert.data.sources import Source
from gqa_convert.training.recipe import Lora, Recipe

DOCUMENT = Path(__file__).with_name("uptraining.md")


def updated(page: str) -> str:
    """The page with the tables as the declarations have them."""
    for first, declared in (("model", Recipe), ("source", Source), ("rank", Lora)):
        table = re.compile(rf"^\| key \|[^\n]*\n\|[-|]+\|\n\| `{first}` \|.*?(?=\n\n)", re.DOTALL | re.MULTILINE)
        assert len(table.findall(page)) == 1, f"{DOCUMENT} has no table whose first key is {first}"
        page = table.sub(lambda _: keys_table(declared), page)  # noqa: B023
    return page


if __name__ == "__main__":
    page = DOCUMENT.read_text(encoding="utf-8")
    if "--check" in sys.argv:
        sys.exit(None if updated(page) == page else f"{DOCUMENT} is out of date: run docs/make_recipe_keys.py")
    DOCUMENT.write_text(updated(page), encoding="utf-8")
