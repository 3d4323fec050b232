"""Licences: what the source states, and what some licences require of those who publish a changed model."""

import re
from dataclasses import dataclass
from typing import Any

from gqa_convert.errors import OptionError
from gqa_convert.measuring.results.fields import printable
from gqa_convert.publishing.markup import code

_ID = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}")
_LLAMA = {
    "llama3": ("Built with Meta Llama 3", "Llama 3"),
    "llama3.1": ("Built with Llama", "Llama"),
    "llama3.2": ("Built with Llama", "Llama"),
    "llama3.3": ("Built with Llama", "Llama"),
    "llama4": ("Built with Llama", "Llama"),
}
"""The words that a card must show, and those with which the name of a derived model must begin (section 1.b.i of each
licence).
"""
_OPEN = {
    "apache-2.0",
    "mit",
    "bsd",
    "bsd-2-clause",
    "bsd-3-clause",
    "bsd-3-clause-clear",
    "cc0-1.0",
    "cc-by-2.0",
    "cc-by-2.5",
    "cc-by-3.0",
    "cc-by-4.0",
    "unlicense",
    "isc",
    "zlib",
    "wtfpl",
    "afl-3.0",
    "artistic-2.0",
    "bsl-1.0",
    "ecl-2.0",
    "ncsa",
    "postgresql",
    "pddl",
    "ms-pl",
    "odc-by",
    "cdla-permissive-1.0",
    "cdla-permissive-2.0",
}
"""Licences that require only that they and the changes are stated, which the card does."""


@dataclass(frozen=True)
class Licence:
    """The licence that the card states.

    Attributes:
        ids: identifiers of the Hub, empty if unknown.
        name: of a licence that the Hub does not know.
        link: to the text of that licence.
        inherited: whether the source states it, rather than the user.
    """

    ids: tuple[str, ...] = ()
    name: str | None = None
    link: str | None = None
    inherited: bool = True


def find_licence(stated: dict[str, Any], given: str | None) -> tuple[Licence, list[str]]:
    """The licence, and warnings for the publisher.

    Args:
        stated: by the source's README: words and lists of words by key.
        given: by the user.

    Raises:
        OptionError: the given licence is not an identifier.
    """
    named = stated.get("license", [])
    ids = tuple(each.lower() for each in ([named] if isinstance(named, str) else named) if _ID.fullmatch(each.lower()))
    if given is not None:
        if not _ID.fullmatch(given.lower()):
            raise OptionError(
                f"--license {given!r} is not a licence of the Hub: give an identifier such as apache-2.0, llama2 or other"
            )
        chosen = given.lower()
        warnings = (
            [f"--license {chosen} replaces {', '.join(ids)}, which the source's README.md states"]
            if ids and ids != (chosen,)
            else []
        )
        if ids != (chosen,):
            return Licence((chosen,), inherited=False), warnings
    return Licence(ids, _text(stated.get("license_name")), _text(stated.get("license_link"))), []


def duties(licence: Licence, repo_id: str) -> tuple[list[str], list[str]]:
    """Statements that the licence requires of the card, as Markdown, and warnings for the publisher."""
    said: list[str] = []
    warnings: list[str] = []
    if not licence.ids:
        warnings.append(
            "no licence is known: without one the model may not be used, and the source's terms may forbid publishing it; find them, and give --license"
        )
    for each in licence.ids:
        words, warning = _duty(each, repo_id)
        said += words
        warnings += [f"licence {each}: {warning}"] if warning else []
    return said, warnings


def _duty(name: str, repo_id: str) -> tuple[list[str], str]:
    own = repo_id.rsplit("/", 1)[-1]
    if name in _LLAMA:
        words, prefix = _LLAMA[name]
        fits = re.sub(r"[\s_.-]", "", own).lower().startswith(prefix.replace(" ", "").lower())
        naming = "" if fits else f"the model's name must begin with {prefix!r}, and {own!r} does not; "
        return (
            [f"**{words}**"],
            f"{naming}the repository must hold a copy of the agreement and a notice file, and the acceptable use policy binds users",
        )
    if name == "llama2":
        return (
            [],
            "the repository must hold a copy of the agreement and a notice file, and the acceptable use policy binds users",
        )
    if name == "gemma":
        return (
            [],
            "the terms of use and their restrictions must be passed on with the model, and the changes stated, as the card does",
        )
    if re.search(r"(^|-)nd(-|$)", name):
        return (
            [],
            "it forbids sharing changed versions, and this model is one: ask the source's authors before you publish it",
        )
    if re.search(r"(^|-)nc(-|$)|non-?commercial|research", name):
        share = " and under the same licence" if re.search(r"(^|-)sa(-|$)", name) else ""
        return [], f"for non-commercial use only{share}"
    if re.search(r"(^|-)sa(-|$)|^(l|a)?gpl", name):
        return [], "changed versions must be published under the same licence"
    if "rail" in name:
        return [], "its restrictions of use and a copy of the licence must be passed on with the model"
    if name == "other":
        return [], "the Hub does not know it: read it, and check that it lets you publish a changed model"
    return (
        [],
        ""
        if name in _OPEN
        else "gqa-convert does not know its terms: read them, and check that they let you publish a changed model",
    )


def as_markdown(licence: Licence) -> str:
    """The licence in words."""
    if not licence.ids:
        return "Not known: the source states none. The model may not be used without the permission of its authors."
    named = ", ".join(code(each) for each in licence.ids)
    details = [
        f"name {code(licence.name)}" if licence.name else "",
        f"terms at {code(licence.link)}" if licence.link else "",
    ]
    more = f" ({', '.join(each for each in details if each)})" if any(details) else ""
    return f"{named}{more}, " + ("that of the source." if licence.inherited else "as its publisher states.")


def _text(value: object) -> str | None:
    return printable(value)[:300] if isinstance(value, str) and value.strip() else None
