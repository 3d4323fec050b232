"""How commands present their help: the text from the docstring, plain usage lines, no type beside flags."""

import inspect
import re
from collections.abc import Callable
from typing import Any

from typer.core import TyperCommand, TyperGroup

SUMMARY = """Convert a multi-head or grouped-query checkpoint to fewer K/V heads, prove the result, and measure what it costs and saves.

[bold]Try it[/bold] on a small bundled model, offline, in about five minutes:

  gqa-convert demo

[bold]Convert a model.[/bold] With calibration text (any text like what the model will read) it loses least:

  gqa-convert plan     ./Llama-2-7b --groups 8
  gqa-convert convert  ./Llama-2-7b ./Llama-2-7b-gqa8 --groups 8 --calibration text.txt
  gqa-convert verify   ./Llama-2-7b-gqa8 --source ./Llama-2-7b
  gqa-convert evaluate ./Llama-2-7b ./Llama-2-7b-gqa8 --data test.txt

Every command has examples: gqa-convert COMMAND --help"""


def help_text(command: Callable[..., None]) -> str:
    """Return a command's docstring with one line per paragraph, for the terminal to wrap; indented lines are kept."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    first, *others = (text if text.startswith(" ") else " ".join(text.split("\n")) for text in paragraphs)
    # the empty paragraph keeps typer from indenting the others like the examples
    return "\n\n".join([first, "", *others])


class _PlainHelp:
    """Shows `OUT` instead of `{OUT}` in usage lines, and flags without the type `<bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False) and param.metavar is None:
                param.metavar = ""
        return params

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces: list[str] = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [re.sub(r"[{}]", "", piece).replace("......", "...") for piece in pieces]


class PlainCommand(_PlainHelp, TyperCommand):
    """A command with plain help."""


class PlainGroup(_PlainHelp, TyperGroup):
    """The command line as a whole, with plain help."""
