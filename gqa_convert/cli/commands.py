"""The commands by name, and their help. The file of a command and its function have its name, with
`_` for `-`.

Help is plain and typer's own: rich, with which it can draw panels, takes longer to import than all
the rest of `--help`.
"""

import os
import re
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from inspect import cleandoc
from typing import Any

from typer.core import TyperCommand, TyperGroup

SUMMARY = """Convert a multi-head or grouped-query checkpoint to fewer K/V heads, prove the result,
and measure what it costs and saves.

With calibration text (any text like what the model will read) a model loses least; demo shows it on
a bundled one.

  gqa-convert demo
  gqa-convert convert  ./Llama-2-7b --kv-heads 8 --dry-run
  gqa-convert convert  ./Llama-2-7b ./gqa8 --kv-heads 8 --calibration text.txt
  gqa-convert verify   ./gqa8 --source ./Llama-2-7b
  gqa-convert evaluate ./Llama-2-7b ./gqa8 --data test.txt

Every command has examples: gqa-convert COMMAND --help"""


def help_text(text: str) -> str:
    """Return a text for typer, which wraps paragraphs but for those that begin with a backspace:
    examples.
    """
    return re.sub(r"(?m)(?<=\n\n)(?= )", "\b\n", text)


class _PlainHelp:
    """Usage lines show `OUT` instead of `{OUT}`, and no type stands beside arguments."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if param.name == "help":
                param.default = (
                    False  # typer imports pydantic to check any value of a flag but True and False
                )
            if param.param_type_name == "argument":
                param.display_type_rich = lambda ctx: None
        return params

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces: list[str] = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [
            re.sub(r"[{}]", "", piece).replace("......", "...").replace("...]...", "...]")
            for piece in pieces
        ]


class Command(_PlainHelp, TyperCommand):
    """A command in the list of all commands."""

    def get_short_help_str(self, limit: int = 1000) -> str:
        """The first sentence, however long it is."""
        return super().get_short_help_str(max(limit, 1000))


class CommandGroup(_PlainHelp, TyperGroup):
    """The command line as a whole."""


COMMANDS = (
    "inspect",
    "convert",
    "verify",
    "uptrain",
    "evaluate",
    "benchmark",
    "check-serving",
    "publish",
    "demo",
)


def on_first(command: Callable[..., None]) -> Callable[..., None]:
    """A command that runs on the first process of a launcher alone, which tells the others what to
    do.
    """

    @wraps(command)
    def run(**arguments: Any) -> None:
        if "WORLD_SIZE" not in os.environ:
            return command(**arguments)
        from gqa_convert.processes import follow, join, leading, rank, taking_part

        with taking_part():
            join()
            if rank():
                return follow()
            with leading():
                return command(**arguments)

    return run


def add_commands(app: Any) -> None:
    """Add every command to the typer application. Its file imports options alone; the work is
    imported when it is called.
    """
    for name in COMMANDS:
        identifier = name.replace("-", "_")
        function = getattr(import_module(f"gqa_convert.cli.{identifier}"), identifier)
        app.command(name, cls=Command, help=help_text(cleandoc(function.__doc__)))(function)
