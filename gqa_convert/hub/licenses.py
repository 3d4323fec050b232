"""Licences: what the source or the user states, and the words that some require on a card."""

import re
from dataclasses import dataclass
from typing import Any

from gqa_convert.runtime.json_objects import JsonObject

LICENSE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]{0,63}")
_BUILT_WITH = {
    "llama3": "Built with Meta Llama 3",
    "llama3.1": "Built with Llama",
    "llama3.2": "Built with Llama",
    "llama3.3": "Built with Llama",
    "llama4": "Built with Llama",
}
"""Words that a card must show, by the licence's identifier (section 1.b.i of each)."""


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
        return _BUILT_WITH.get(self.id or "")


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
