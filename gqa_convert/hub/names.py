"""What a card calls things: local files and folders by their last names, so that no folder of the machine is on it.

Records state a path as a whole value: an argument, a key of a recipe, the source. What follows its last slash is its name,
whatever else is in it, spaces too. A name on the Hub keeps its owner, since the record states its commit beside it.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ON_HUB = ("id", "source", "model")
"""Keys whose value is on the Hub where a `revision` stands beside it."""
_MARK = re.compile(r"-{0,2}[\w.-]+=|-\w|@|")
"""What may stand before the value in an argument: an option, a key of a recipe, or the sign of a file."""
_DATASET = re.compile(r"([\w.-]+/[\w.-]+)@[0-9a-f]{12}\b")
"""A Hub dataset and its commit, in words."""
_TEXT_BEGINS = re.compile(r"\d+ tokens of |")


class PublicNames:
    """The names of what a record states.

    Args:
        record: plain data, in which everything that is on the Hub has its commit.

    Attributes:
        local: the names of local paths, by the paths as the record states them.
    """

    def __init__(self, record: Any) -> None:
        self._on_hub = set(_hub_ids(record))
        self.local: dict[str, str] = {}
        self.of(record)  # finds them all, since a description may name what an argument states

    def of(self, value: Any) -> Any:
        """The value, and all that is in it, without folders."""
        if isinstance(value, dict):
            return {key: self._under(key, each) for key, each in value.items()}
        if isinstance(value, list):
            return [self.of(each) for each in value]
        return self.name(value) if isinstance(value, str) else value

    def _under(self, key: str, value: Any) -> Any:
        if key == "machine":  # names of processors hold slashes
            return value
        if key == "command" and value is not None:
            return [self._argument(word) for word in value]
        if key == "text" and isinstance(value, str):
            return self._description(value)
        return self.of(value)

    def name(self, text: str) -> str:
        """A whole value: unchanged if it is no local path."""
        is_path = "/" in text or text.startswith("~")
        if not is_path or text in self._on_hub or re.match("https?://", text):
            return text
        self.local[text] = (Path(text).name or ".") if "/" in text else "~"
        return self.local[text]

    def _argument(self, word: str) -> str:
        mark = _MARK.match(word)[0]  # type: ignore[index]  # it matches nothing, too
        value = word.removeprefix(mark)
        name = self.name(value)
        # lists of sources are stated by the recipe, too
        return mark + ("..." if name != value and value.startswith(("[", "{")) else name)

    def _description(self, text: str) -> str:
        """Words on calibration text. A path that no argument states goes with everything before its last slash."""
        for path in sorted(self.local, key=len, reverse=True):
            text = text.replace(path, self.local[path])
        if "/" not in _DATASET.sub("", text):
            return text
        begins = _TEXT_BEGINS.match(text)[0]  # type: ignore[index]
        return begins + text.rpartition("/")[2]


def _hub_ids(value: Any) -> Iterator[str]:
    """The names in a record beside which a commit stands."""
    if isinstance(value, dict):
        if value.get("revision"):
            yield from (str(value[key]) for key in _ON_HUB if key in value)
        yield from _DATASET.findall(str(value.get("text")))
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _hub_ids(each)
