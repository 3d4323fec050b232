"""Reads recipes: a flat YAML file with `key=value` overrides.

Plain YAML scalars stay text until the key's type converts them, so that 1e9, 10B and 2e-4 are read as numbers and `no`
as text (YAML 1.1 reads 1e9 as text and `no` as false).
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from gqa_convert.checkpoint.paths import local_path
from gqa_convert.data.keys import fields_of, suggestion
from gqa_convert.errors import RecipeError
from gqa_convert.training.recipe import Recipe, make_recipe


class _Loader(yaml.SafeLoader):
    """A YAML loader for which scalars are text, true, false or null, and a key that is given twice is a mistake."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str) or key in seen:
                problem = f"{key!r} is given twice" if isinstance(key, str) else f"a key must be a word, not {key!r}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("(?:true|True|TRUE|false|False|FALSE)$"), [*"tTfF"])
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])


def _load(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as mistake:
        mark = getattr(mistake, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None and "\n" in text else ""
        problem = getattr(mistake, "problem", None) or str(mistake).splitlines()[0]
        raise RecipeError(f"{where}{line} is not valid YAML: {problem}") from None


def read_recipe(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Recipe:
    """Read the recipe in a YAML file.

    Args:
        path: the path of the file.
        overrides: `key=value` pairs that replace values of the file. A budget stated here replaces the file's budget,
            whichever keys state it.

    Raises:
        RecipeError: the file or an override can't be read, or the recipe is inconsistent.
    """
    values = _read_file(local_path(path))
    changes = _read_overrides(overrides)
    if changes.get("tokens") is not None:
        values.pop("alpha", None)
        values.pop("pretraining_tokens", None)
    elif changes.get("alpha") is not None and "pretraining_tokens" in values | changes:
        values.pop("tokens", None)
    try:
        return make_recipe(values | changes)
    except RecipeError as mistake:
        raise RecipeError("\n".join(f"{path}: {line}" for line in str(mistake).splitlines())) from None


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        raise RecipeError(f"the recipe {path} can't be read ({problem}): give the path of a YAML file") from None
    loaded = _load(text + "\n", str(path))
    if not loaded or not isinstance(loaded, dict):
        raise RecipeError(
            f"{path} holds no keys: a recipe is a list of lines `key: value`, with at least model, output, data and tokens"
        )
    return loaded


def _read_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    values = {}
    for override in overrides:
        name, sign, text = override.partition("=")
        name = name.strip()
        if not sign:
            raise RecipeError(f"the override {override!r} has no value: write it as key=value")
        if name not in fields_of(Recipe):
            raise RecipeError(f"the override {override!r} has an unknown key {name!r}: {suggestion(name, Recipe)}")
        values[name] = _load(text, f"the override {override!r}")
    return values
