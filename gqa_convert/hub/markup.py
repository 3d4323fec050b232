"""Markdown from names and texts of files that may hold anything: nothing in them becomes markup.

`ModelCard.from_template` of huggingface_hub renders undefined names as nothing and escapes no
value; `render` does both.
"""

import html
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gqa_convert.errors import printable
from gqa_convert.families.layerwise import heads_text
from gqa_convert.measuring.tables import number
from gqa_convert.runtime.messages import size

_MARKUP = re.compile(r"([\\`*_{}\[\]#|~!$])")
_CODE = str.maketrans("`|", "'¦")
"""What ends a code span or a cell of a table, and what stands for it."""


class Markdown(str):
    """Text that is Markdown already and must not be escaped again."""

    __slots__ = ()


def render(template: Path, card: object) -> str:
    """Render a template of jinja2 that reads `card`; values that are not `Markdown` are escaped.

    Raises:
        jinja2.UndefinedError: the template reads a name or an attribute that does not exist.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        undefined=StrictUndefined,
        finalize=_plain,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    tools = (code, fenced, shell, number, significant, size, heads_text, Markdown)
    environment.filters |= {tool.__name__: tool for tool in tools}
    return environment.from_string(template.read_text("utf-8")).render(card=card)


def code(text: str) -> Markdown:
    """The text as a code span on one line, in which nothing is markup."""
    line = printable(text).translate(_CODE)
    return Markdown(f"`{line or ' '}`")


def _plain(value: Any) -> Any:
    """A text as running text on one line, in which nothing is markup; any other value as it is."""
    if not isinstance(value, str) or isinstance(value, Markdown):
        return value
    return _MARKUP.sub(r"\\\1", html.escape(printable(value), quote=False))


def fenced(text: str, language: str) -> Markdown:
    """The text as a code block. None of its lines may begin with a backtick; those of `shell` do
    not.
    """
    return Markdown(f"```{language}\n{text}\n```")


def shell(command: Sequence[str]) -> str:
    """A command as a shell takes it."""
    return shlex.join(map(printable, command))


def significant(value: float | None, error: float | None = None) -> str:
    """A number with four significant digits and its standard error, each where it is known."""
    text = number(value, ".4g")
    return f"{text} ± {error:.2g}" if error else text
