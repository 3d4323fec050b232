"""The commands by name. The file of a command and its function have its name, with `_` for `-`."""

from importlib import import_module
from inspect import cleandoc
from typing import Any

from .help import Command, first_sentence, help_text

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


def add_commands(app: Any) -> None:
    """Add every command to the typer application. Its file imports options alone; the work is imported when it is called."""
    for name in COMMANDS:
        identifier = name.replace("-", "_")
        function = getattr(import_module(f"gqa_convert.cli.{identifier}"), identifier)
        text = cleandoc(function.__doc__)
        app.command(name, cls=Command, help=help_text(text), short_help=first_sentence(text))(function)
