"""Licences: what the source states, and what some licences require of those who publish a changed model."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

Words = Mapping[str, str | list[str]]
"""What the source's README states: words and lists of words by key."""

_BUILT_WITH = {
    "llama3": "Built with Meta Llama 3",
    "llama3.1": "Built with Llama",
    "llama3.2": "Built with Llama",
    "llama3.3": "Built with Llama",
    "llama4": "Built with Llama",
}
"""Words that a card must show; what is built with begins the name of a derived model (section 1.b.i of each licence)."""
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
        ids: identifiers of the Hub, empty if unknown.
        name, link: of a licence that the Hub does not know, and of its text.
        inherited: whether the source states it, rather than the user.
    """

    ids: list[str]
    name: str | list[str] | None = None
    link: str | list[str] | None = None
    inherited: bool = True

    @property
    def notices(self) -> list[str]:
        """Words that the licence requires a card to show."""
        return [_BUILT_WITH[name] for name in self.ids if name in _BUILT_WITH]


def find_license(stated: Words, given: str | None) -> tuple[License, list[str]]:
    """The licence, and warnings for the publisher.

    Args:
        stated: by the source.
        given: by the user.
    """
    named = stated.get("license", [])
    words = [named] if isinstance(named, str) else named
    ids = [word.lower() for word in words if LICENSE_ID.fullmatch(word)]
    if given is None or [given.lower()] == ids:
        return License(ids, stated.get("license_name"), stated.get("license_link")), []
    warnings = [f"--license {given} replaces {', '.join(ids)}, which the source's README.md states"] if ids else []
    return License([given.lower()], inherited=False), warnings


def reminders(of: License, name: str) -> list[str]:
    """What the licence requires of the publisher of a model of this name."""
    if not of.ids:
        return [_UNKNOWN]
    found = []
    for each in of.ids:
        text = next(text for pattern, text in _REMINDERS if re.fullmatch(pattern, each))
        if each in _BUILT_WITH:
            prefix = _BUILT_WITH[each].removeprefix("Built with ").removeprefix("Meta ")
            letters = re.sub(r"[\s_.-]", "", name).lower()
            if not letters.startswith(prefix.replace(" ", "").lower()):
                text = f"the model's name must begin with {prefix!r}, and {name!r} does not; {text}"
        if text:
            found.append(f"licence {each}: {text}")
    return found
