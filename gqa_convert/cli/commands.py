"""The commands by name. The file of a command and its function have its name, with `_` for `-`."""

import os
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from inspect import cleandoc
from typing import Any

from .help import Command, help_text

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
    """A command that runs on the first process of a launcher alone, which tells the others what to do."""

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
    """Add every command to the typer application. Its file imports options alone; the work is imported when it is called."""
    for name in COMMANDS:
        identifier = name.replace("-", "_")
        function = getattr(import_module(f"gqa_convert.cli.{identifier}"), identifier)
        app.command(name, cls=Command, help=help_text(cleandoc(function.__doc__)))(function)
