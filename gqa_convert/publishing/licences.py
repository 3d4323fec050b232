"""Licences: what the source states of its own, and what some of them ask of those who publish a changed model."""

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
"""The words that a card has to show, and those that the name of a derived model has to begin with (section 1.b.i of
each licence).
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
"""Licences that ask for no more than that they and the changes are named, which the card does."""


@dataclass(frozen=True)
class Licence:
    """What the card says.

    Attributes:
        ids: as the Hub knows them, none if unknown.
        name: of one that the Hub does not know.
        link: to it.
        inherited: stated by the source, not given by the user.
    """

    ids: tuple[str, ...] = ()
    name: str | None = None
    link: str | None = None
    inherited: bool = True


def find_licence(stated: dict[str, Any], given: str | None) -> tuple[Licence, list[str]]:
    """The licence, and what the publisher should know.

    Args:
        stated: by the source's README, words and lists of words.
        given: by the user.

    Raises:
        OptionError: what was given is no identifier of a licence.
    """
    named = stated.get("license", [])
    ids = tuple(each.lower() for each in ([named] if isinstance(named, str) else named) if _ID.fullmatch(each.lower()))
    if given is not None:
        if not _ID.fullmatch(given.lower()):
            raise OptionError(
                f"--license {given!r} is no licence of the Hub: give an identifier such as apache-2.0, llama2 or other"
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
    """What the card has to say, as Markdown, and what to tell the publisher."""
    said: list[str] = []
    warnings: list[str] = []
    if not licence.ids:
        warnings.append(
            "no licence is known: without one nobody may use the model, and the source's terms may forbid publishing it; find them, and give --license"
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
            f"{naming}a copy of the agreement and a notice file have to go with the model, and the acceptable use policy binds users",
        )
    if name == "llama2":
        return (
            [],
            "a copy of the agreement and a notice file have to go with the model, and the acceptable use policy binds users",
        )
    if name == "gemma":
        return (
            [],
            "the terms of use and their restrictions have to be passed on with the model, and the changes be named, as the card does",
        )
    if re.search(r"(^|-)nd(-|$)", name):
        return (
            [],
            "it forbids sharing changed versions, which this model is: ask the source's authors before publishing it",
        )
    if re.search(r"(^|-)nc(-|$)|non-?commercial|research", name):
        share = " and under the same licence" if re.search(r"(^|-)sa(-|$)", name) else ""
        return [], f"for non-commercial use only{share}"
    if re.search(r"(^|-)sa(-|$)|^(l|a)?gpl", name):
        return [], "changed versions have to be published under the same licence"
    if "rail" in name:
        return [], "its restrictions of use have to be passed on with the model, and a copy of the licence"
    if name == "other":
        return [], "it is not one that the Hub knows: read it, and see that it lets you publish a changed model"
    return (
        [],
        ""
        if name in _OPEN
        else "its terms are not known here: read them, and see that they let you publish a changed model",
    )


def as_markdown(licence: Licence) -> str:
    """The licence in words."""
    if not licence.ids:
        return "Not known: the source states none. Without the permission of its authors the model may not be used."
    named = ", ".join(code(each) for each in licence.ids)
    details = [
        f"name {code(licence.name)}" if licence.name else "",
        f"terms at {code(licence.link)}" if licence.link else "",
    ]
    more = f" ({', '.join(each for each in details if each)})" if any(details) else ""
    return f"{named}{more}, " + ("that of the source." if licence.inherited else "as its publisher states.")


def _text(value: object) -> str | None:
    return printable(value)[:300] if isinstance(value, str) and value.strip() else None
