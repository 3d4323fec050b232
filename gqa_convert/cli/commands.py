"""The commands by name: each is imported when it is called, so that none waits for the options of the others."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from .help import PlainCommand, PlainHelp, help_text

COMMANDS = {
    "Before converting": ("plan", "inspect", "restate"),
    "Converting": ("convert", "verify", "tokenize", "uptrain"),
    "Measuring": ("evaluate", "benchmark"),
    "Serving and sharing": ("check-serving", "publish"),
    "Trying": ("demo",),
}
"""The names of the commands by the heading of the first help screen; the file of a command and its function have its
name, with `_` for `-`.
"""


def _function(name: str) -> Callable[..., None]:
    """Import and return the function of a command."""
    identifier = name.replace("-", "_")
    found: Callable[..., None] = getattr(import_module(f"gqa_convert.cli.{identifier}"), identifier)
    return found


@cache
def _command(name: str) -> Any:
    """Make a command, with its options."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    function = _function(name)
    app.command(name, cls=PlainCommand, help=help_text(function))(function)
    return typer.main.get_command(app)


class _Commands(Mapping[str, Any]):
    """The commands by name, each made when it is looked up."""

    _names = tuple(name for names in COMMANDS.values() for name in names)

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return _command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class CommandGroup(PlainHelp, TyperGroup):
    """The command line as a whole."""

    commands: Any  # typer declares a dict, of which it uses what a mapping has

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands()

    def panels(self, ctx: Any) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        yield from super().panels(ctx)
        for heading, names in COMMANDS.items():
            yield heading, [(name, help_text(_function(name)).split("\n\n")[0]) for name in names]
