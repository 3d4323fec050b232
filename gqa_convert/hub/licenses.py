"""Licences: what the source states, and what some licences require of those who publish a changed
model.
"""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gqa_convert.runtime.json_objects import JsonObject

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_BUILT_WITH: dict[str, tuple[str, str]] = _TABLES["built_with"]
LICENSE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]{0,63}")
_UNKNOWN = (
    "no licence is known: without one the model may not be used, and the source's terms may forbid "
    "publishing it; find them, and give --license"
)


@dataclass(frozen=True)
class License:
    """The licence that the card states.

    Attributes:
        id: identifier of the Hub, None if unknown.
        name, link: of a licence that the Hub does not know, and of its text.
        inherited: whether the source states it, rather than the user.
    """

    id: str | None
    name: Any = None
    link: Any = None
    inherited: bool = True

    @property
    def notice(self) -> str | None:
        """Words that the licence requires a card to show."""
        return _BUILT_WITH[self.id][0] if self.id in _BUILT_WITH else None


def find_license(stated: JsonObject, given: str | None) -> License:
    """The licence that the user gives, or else that of the source; several licences at once are not
    understood.

    Args:
        stated: by the source.
        given: by the user.
    """
    words = str(stated.get("license", "")).lower()
    if given is not None and given.lower() != words:
        return License(given.lower(), inherited=False)
    if not LICENSE_ID.fullmatch(words):
        return License(None)
    return License(words, stated.get("license_name"), stated.get("license_link"))


def reminders(of: License, name: str) -> list[str]:
    """What the licence requires of the publisher of a model of this name."""
    if of.id is None:
        return [_UNKNOWN]
    found = []
    if of.id in _BUILT_WITH:
        prefix = _BUILT_WITH[of.id][1]
        if not re.sub(r"[_.-]", "", name).lower().startswith(prefix.replace(" ", "").lower()):
            found.append(
                f"licence {of.id}: "
                f"the model's name must begin with {prefix!r}, and {name!r} does not"
            )
    text = next(
        text for pattern, text in _TABLES["reminders"].items() if re.fullmatch(pattern, of.id)
    )
    if text:
        found.append(f"licence {of.id}: {text}")
    return found
