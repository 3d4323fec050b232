"""The command line: one file per command, whose docstring is its help; the work is imported when it is called."""

from collections.abc import Callable
from typing import Annotated, Never

import typer

from gqa_convert._version import __version__

from .benchmark import benchmark
from .check_serving import check_serving
from .convert import convert
from .demo import demo
from .evaluate import evaluate
from .generate_text import generate_text
from .help import SUMMARY, PlainCommand, PlainGroup, help_text
from .inspect import inspect
from .plan import plan
from .publish import publish
from .recommend import recommend
from .report import report
from .restate import restate
from .running import run
from .tokenize import tokenize
from .uptrain import uptrain
from .verify import verify

__all__ = ["app", "main"]

app = typer.Typer(
    name="gqa-convert",
    cls=PlainGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=SUMMARY,
)

_COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    "Before converting": (plan, inspect, recommend, restate),
    "Converting": (convert, verify, generate_text, tokenize, uptrain),
    "Measuring": (evaluate, benchmark, report),
    "Serving and sharing": (check_serving, publish),
    "Trying": (demo,),
}
"""The commands by the heading of the first help screen."""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gqa-convert {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version


for heading, commands in _COMMANDS.items():
    for command in commands:
        app.command(cls=PlainCommand, help=help_text(command), rich_help_panel=heading)(command)


def main() -> Never:
    """Run the command line and exit."""
    run(app)
