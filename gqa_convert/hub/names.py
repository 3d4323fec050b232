"""What a card calls things: local files and folders by their last names, so that no folder is on it.

Records state a path as a whole value: an argument, a key of a recipe, the source. What follows its
last slash is its name, whatever else is in it, spaces too. A name on the Hub keeps its owner, since
the record states its commit beside it.
"""

import json
import re
from pathlib import Path
from typing import Any

from gqa_convert.runtime.json_objects import JsonObject

_ON_HUB = ("id", "source", "model")
"""Keys whose value is on the Hub where a `revision` stands beside it."""
_MARKED = re.compile(r"(-{0,2}[\w.-]+=|-\w|@|)(.*)", re.DOTALL)
"""An argument: what may stand before the value (an option, a key of a recipe, the sign of a file),
and the value.
"""
_DATASET = re.compile(r"([\w.-]+/[\w.-]+)@[0-9a-f]{12}\b")
"""A Hub dataset and its commit, in words."""


class PublicNames:
    """The names of what a record states.

    Args:
        record: plain data, in which everything that is on the Hub has its commit.

    Attributes:
        local: the names of local paths, by the paths as the record states them.
    """

    def __init__(self, record: Any) -> None:
        self.local: dict[str, str] = {}
        self._on_hub: set[Any] = set()
        json.loads(json.dumps(record), object_hook=self._note)
        self.of(record)  # finds all names, since a description may have one that an argument states

    def _note(self, part: JsonObject) -> None:
        if part.get("revision"):
            self._on_hub |= {part.get(key) for key in _ON_HUB}
        self._on_hub |= set(_DATASET.findall(str(part.get("text"))))

    def of(self, value: Any, key: str = "") -> Any:
        """The value of a key, and all that is in it, without folders."""
        if isinstance(value, dict):
            return {name: self.of(each, name) for name, each in value.items()}
        if isinstance(value, list):
            return [self.of(each, key) for each in value]
        if not isinstance(value, str) or key == "processor":  # whose names hold slashes
            return value
        if key == "command":
            mark, stated = _MARKED.fullmatch(value).groups()  # type: ignore[union-attr]  # it matches every word
            name = self.name(stated)
            # lists of sources are stated by the recipe, too
            return mark + ("..." if name != stated and stated.startswith(("[", "{")) else name)
        return self._description(value) if key == "text" else self.name(value)

    def name(self, text: str) -> str:
        """A whole value: unchanged if it is no local path."""
        is_path = "/" in text or text.startswith("~")
        if not is_path or text in self._on_hub or re.match("https?://", text):
            return text
        self.local[text] = (Path(text).name or ".") if "/" in text else "~"
        return self.local[text]

    def _description(self, text: str) -> str:
        """Words on calibration text. A path that no argument states goes with all before its last slash."""
        for path in sorted(self.local, key=len, reverse=True):
            text = text.replace(path, self.local[path])
        if "/" in _DATASET.sub("", text):
            text = re.sub(r"(\d+ tokens of |).*/", r"\1", text, flags=re.DOTALL)
        return text
