"""Licences: what the source states, and what some licences require of those who publish a changed model."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

Words = Mapping[str, str | list[str]]
"""What the source's README states: words and lists of words by key."""

_BUILT_WITH = {
    "llama3": ("Built with Meta Llama 3", "Llama 3"),
    "llama3.1": ("Built with Llama", "Llama"),
    "llama3.2": ("Built with Llama", "Llama"),
    "llama3.3": ("Built with Llama", "Llama"),
    "llama4": ("Built with Llama", "Llama"),
}
"""Words that a card must show, and those with which a derived model's name begins (section 1.b.i of each licence)."""
LICENSE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]{0,63}")
_UNKNOWN = (
    "no licence is known: without one the model may not be used, and the source's terms may forbid publishing it; find "
    "them, and give --license"
)
_PERMISSIVE = (
    r"apache-2\.0|mit|bsd|bsd-[23]-clause|bsd-3-clause-clear|cc0-1\.0|cc-by-[234]\.[05]|unlicense|isc|zlib|wtfpl"
    r"|afl-3\.0|artistic-2\.0|bsl-1\.0|ecl-2\.0|ncsa|postgresql|pddl|ms-pl|odc-by|cdla-permissive-[12]\.0"
)
_REMINDERS = (
    (
        r"llama[234].*",
        "the repository must hold a copy of the agreement and a notice file, and the acceptable use policy binds users",
    ),
    (
        r"gemma",
        "the terms of use and their restrictions must be passed on with the model, and the changes stated, as the card does",
    ),
    (
        r"(.*-)?nd(-.*)?",
        "it forbids sharing changed versions, and this model is one: ask the source's authors before you publish it",
    ),
    (r"(.*-)?nc-sa(-.*)?", "for non-commercial use only and under the same licence"),
    (r"(.*-)?nc(-.*)?|.*non-?commercial.*|.*research.*", "for non-commercial use only"),
    (r"(.*-)?sa(-.*)?|[la]?gpl.*", "changed versions must be published under the same licence"),
    (r".*rail.*", "its restrictions of use and a copy of the licence must be passed on with the model"),
    (r"other", "the Hub does not know it: read it, and check that it lets you publish a changed model"),
    (
        _PERMISSIVE,
        "",  # only that the licence and the changes are stated, which the card does
    ),
    (
        r".*",
        "gqa-convert does not know its terms: read them, and check that they let you publish a changed model",
    ),
)
"""What a licence requires, by a pattern of its identifier; the first that fits counts."""


@dataclass(frozen=True)
class License:
    """The licence that the card states.

    Attributes:
        id: identifier of the Hub, None if unknown.
        name, link: of a licence that the Hub does not know, and of its text.
        inherited: whether the source states it, rather than the user.
    """

    id: str | None
    name: str | list[str] | None = None
    link: str | list[str] | None = None
    inherited: bool = True

    @property
    def notice(self) -> str | None:
        """Words that the licence requires a card to show."""
        return _BUILT_WITH[self.id][0] if self.id in _BUILT_WITH else None


def find_license(stated: Words, given: str | None) -> License:
    """The licence that the user gives, or else that of the source; several licences at once are not understood.

    Args:
        stated: by the source.
        given: by the user.
    """
    words = str(stated.get("license")).lower()
    if given is not None and given.lower() != words:
        return License(given.lower(), inherited=False)
    if "license" not in stated or not LICENSE_ID.fullmatch(words):
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
            found.append(f"licence {of.id}: the model's name must begin with {prefix!r}, and {name!r} does not")
    text = next(text for pattern, text in _REMINDERS if re.fullmatch(pattern, of.id))
    if text:
        found.append(f"licence {of.id}: {text}")
    return found
