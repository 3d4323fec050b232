"""How commands present their help: the text from the docstring, commands that can be copied, plain usage lines."""

import inspect
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from typer.core import TyperCommand

from .console.panels import panel

SUMMARY = """Convert a multi-head or grouped-query checkpoint to fewer K/V heads, prove the result, and measure what it costs and saves.

[bold]Try it[/bold] on a small bundled model, offline, in about five minutes:

  gqa-convert demo

[bold]Convert a model.[/bold] With calibration text (any text like what the model will read) it loses least:

  gqa-convert plan     ./Llama-2-7b --groups 8
  gqa-convert convert  ./Llama-2-7b ./Llama-2-7b-gqa8 --groups 8 \\
      --calibration text.txt
  gqa-convert verify   ./Llama-2-7b-gqa8 --source ./Llama-2-7b
  gqa-convert evaluate ./Llama-2-7b ./Llama-2-7b-gqa8 --data test.txt

Every command has examples: gqa-convert COMMAND --help"""

_COMMAND = 76
"""Characters of a line of a command, with which it fits 80 columns."""


def help_text(command: Callable[..., None]) -> str:
    """Return a command's docstring with one line per paragraph, for the terminal to wrap; commands are broken by `\\`."""
    return "\n\n".join(map(_flowed, inspect.cleandoc(command.__doc__ or "").split("\n\n")))


def _flowed(paragraph: str) -> str:
    """Return a paragraph as one line, or commands, which are indented, as lines that 80 columns hold."""
    if not paragraph.startswith(" "):
        return " ".join(paragraph.split("\n"))
    return "\n".join(line for command in paragraph.split("\n") for line in _continued(command))


def _continued(command: str) -> Iterator[str]:
    """Yield the lines of a command, broken before its options so that it can be copied from the terminal."""
    first, *options = re.split(r" (?=-)", command)
    for option in options:
        if len(first) + len(option) + 1 > _COMMAND:
            yield f"{first} \\"
            first = f"      {option}"
        else:
            first += f" {option}"
    yield first


_PANELS = 70
"""Columns of a terminal below which a panel would cut the names of options."""
_WIDEST = 120
"""Columns beyond which lines are hard to read."""
_STYLES = {"\x02": "\x1b[1m", "\x03": "\x1b[0m"}
"""What begins and ends bold words, as one character while lines are broken, and as a terminal takes it."""


class PlainHelp:
    """Help without rich, whose import would take most of the time of `--help`: a paragraph for every one of the text, and
    a panel for the arguments, for the options, and for every heading of commands.

    Usage lines show `OUT` instead of `{OUT}`, and no type stands beside flags and arguments.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if param.name == "help" and param.default is None:
                param.default = False  # typer imports pydantic to check any value of a flag but True and False
            if getattr(param, "is_flag", False) and param.metavar is None:
                param.metavar = ""
            elif param.param_type_name == "argument":
                param.display_type_rich = lambda ctx: None
        return params

    def panels(self, ctx: Any) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        """Yield every panel's title and its rows of a name and its description."""
        command: Any = self
        rows: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in command.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                kind = "Arguments" if param.param_type_name == "argument" else "Options"
                rows[kind].append(record)
        yield from rows.items()

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
            ctx.color = False
        columns = shutil.get_terminal_size().columns
        narrow = columns < _PANELS
        width, indent = (max(20, columns - 1), "") if narrow else (min(columns, _WIDEST), " ")
        command: Any = self
        usage = ctx.make_formatter()
        usage.width = width - 2 * len(indent)
        command.format_usage(ctx, usage)
        paragraphs = [usage.getvalue().rstrip("\n")]
        paragraphs += ["\n".join(_wrapped(text, usage.width)) for text in command.help.split("\n\n")]
        formatter.write("\n" * len(indent))
        for paragraph in paragraphs:
            formatter.write(textwrap.indent(paragraph, indent) + "\n\n")
        formatter.width = width
        for title, rows in self.panels(ctx):
            if narrow:
                for name, text in rows:
                    _write_entry(formatter, name, text)
            elif rows:
                formatter.write("\n".join(panel(title, rows, width)) + "\n")

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces: list[str] = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [re.sub(r"[{}]", "", piece).replace("......", "...") for piece in pieces]


def _wrapped(paragraph: str, width: int) -> Iterator[str]:
    """Yield the lines of a paragraph; an indented one consists of commands, which are not broken."""
    text = paragraph.replace("[bold]", "\x02").replace("[/bold]", "\x03").replace("\\[", "[")
    for line in text.splitlines():
        for part in [line] if line.startswith(" ") else textwrap.wrap(line, width, break_on_hyphens=False):
            yield "".join(_STYLES.get(character, character) for character in part)


def _write_entry(formatter: Any, name: str, text: str) -> None:
    """Write an option, an argument or a command, and its description below it."""
    formatter.write_text(name)
    with formatter.indentation():
        formatter.write_text(text)


class PlainCommand(PlainHelp, TyperCommand):
    """A command with plain help."""
