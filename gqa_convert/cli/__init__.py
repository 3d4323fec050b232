"""The command line: one file per command, whose docstring is its help; the work is imported when it
is called.
"""

from typing import Never

import typer

from gqa_convert._version import __version__

from .commands import SUMMARY, CommandGroup, add_commands, help_text
from .running import run

__all__ = ["app", "main"]

app = typer.Typer(
    name="gqa-convert",
    cls=CommandGroup,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help=help_text(SUMMARY),
    invoke_without_command=True,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gqa-convert {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    _version: bool = typer.Option(
        False,
        "--version",
        callback=_print_version,
        is_eager=True,
        help="Print the version and exit.",
    ),
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


add_commands(app)


def main() -> Never:
    """Run the command line and exit."""
    run(app)
