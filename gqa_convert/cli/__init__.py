"""The commands. Each one reads like its help text; the work is done elsewhere and imported when it is called."""

import contextlib
import inspect as inspection
import os
import signal
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Annotated, Never

import typer

from gqa_convert._version import __version__
from gqa_convert.cli.console.screen import prepare_streams
from gqa_convert.errors import GQAConvertError, InterruptedRunError, OptionError

from .benchmark import benchmark
from .check_serving import check_serving
from .convert import convert
from .demo import demo
from .evaluate import evaluate
from .inspect import inspect
from .plan import plan
from .publish import publish
from .recommend import recommend
from .report import report
from .restate import restate
from .uptrain import uptrain
from .verify import verify

app = typer.Typer(
    name="gqa-convert",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Turn a multi-head-attention checkpoint into a grouped-query one, prove it, and use it.

    [bold]Try it[/bold] (offline, some minutes):  gqa-convert demo

    [bold]A real one[/bold]:

      gqa-convert plan    ./Llama-2-7b --groups 8
      gqa-convert convert ./Llama-2-7b ./Llama-2-7b-gqa8 --groups 8
      gqa-convert verify  ./Llama-2-7b-gqa8 --source ./Llama-2-7b""",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"gqa-convert {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version


def _help(command: Callable[..., None]) -> str:
    """The docstring with a line per paragraph, for the terminal to break; indented lines stay as they are."""
    paragraphs = inspection.cleandoc(command.__doc__ or "").split("\n\n")
    first, *others = (text if text.startswith(" ") else " ".join(text.split("\n")) for text in paragraphs)
    return "\n\n".join(
        [first, "", *others]
    )  # from the empty one typer sees that what follows is indented less than examples


for command in (
    plan,
    inspect,
    recommend,
    restate,
    convert,
    verify,
    check_serving,
    uptrain,
    evaluate,
    benchmark,
    report,
    publish,
    demo,
):
    app.command(help=_help(command))(command)


def main() -> Never:
    """Run the command line; every mistake becomes one line on stderr and an exit code."""
    prepare_streams()
    os.environ.setdefault(
        "TRANSFORMERS_VERBOSITY", "error"
    )  # what it would say of a checkpoint is in the lines of our own
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # torch's and transformers', for those who program with them
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminated)
    try:
        _refuse_foreign_bytes(sys.argv[1:])
        code = app(standalone_mode=False)
    except GQAConvertError as mistake:
        sys.exit(mistake.exit_code if mistake.told_elsewhere else _report(str(mistake), mistake.exit_code))
    except Exception as problem:
        # typer brings its own copy of click's exceptions or uses click's, depending on its version
        if hasattr(problem, "format_message") and hasattr(problem, "exit_code"):
            text = " ".join(problem.format_message().split()).rstrip(".")
            sys.exit(_report(f"{text}: see gqa-convert --help", problem.exit_code) if text else problem.exit_code)
        if isinstance(problem, OSError):
            sys.exit(_report(f"{problem.filename or 'the system'}: {problem.strerror or problem}", 1))
        raise
    sys.exit(code if isinstance(code, int) else 0)


def _refuse_foreign_bytes(arguments: list[str]) -> None:
    """Every command writes what it was given into records, which are UTF-8."""
    for argument in arguments:
        if any("\udc80" <= char <= "\udcff" for char in argument):
            raise OptionError(
                f"the argument {argument} is no UTF-8, in which results record it: rename the file or folder"
            )


def _terminated(number: int, frame: FrameType | None) -> None:
    del frame
    raise InterruptedRunError(f"stopped by {signal.Signals(number).name}: nothing was left behind")


def _report(message: str, code: int) -> int:
    with contextlib.suppress(
        OSError
    ):  # of a stream whose disk is full or whose reader has gone; the exit code says it as well
        sys.stderr.write(f"gqa-convert: {' '.join(message.split())}\n")
        sys.stderr.flush()
    if "--json" in sys.argv[1:]:
        from gqa_convert.cli.console.screen import print_json

        with contextlib.suppress(OSError):
            print_json({"error": message, "exit_code": code})
    return code
