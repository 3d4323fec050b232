"""Run the command line so that every mistake becomes one line on stderr and an exit code."""

import contextlib
import os
import re
import signal
import sys
import warnings
from types import FrameType
from typing import Any, Never

from gqa_convert.errors import GQAConvertError, InterruptedRunError, OptionError

from .console.screen import prepare_streams, print_json


def run(app: Any) -> Never:
    """Run the typer application `app` with the arguments of this process, and exit."""
    prepare_streams()
    os.environ.setdefault(
        "TRANSFORMERS_VERBOSITY", "error"
    )  # this program reports on checkpoints itself
    if not sys.stderr.isatty():
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # those of torch and transformers are for developers
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup, or a shell in the background
            signal.signal(number, _stop)
    try:
        for argument in sys.argv[1:]:
            if re.search("[\udc80-\udcff]", argument):  # a record is UTF-8
                raise OptionError(
                    f"the argument {argument} is not UTF-8, so that records cannot hold it: rename "
                    "the file or folder"
                )
        sys.exit(app(prog_name="gqa-convert", standalone_mode=False))
    except (GQAConvertError, InterruptedRunError) as mistake:
        # a library's thread that starts while Python ends would print a traceback
        sys.unraisablehook = lambda _: None
        if not mistake.reported_elsewhere:
            _report(str(mistake), mistake.exit_code)
        sys.exit(mistake.exit_code)
    except Exception as problem:
        # typer brings its own copy of click's exceptions or uses click's, depending on its version
        if hasattr(problem, "format_message"):
            _report_usage(problem)
        if isinstance(problem, OSError):
            _report(f"{problem.filename or 'the system'}: {problem.strerror or problem}", 1)
        raise


def _stop(number: int, _frame: FrameType | None) -> None:
    raise InterruptedRunError(
        f"stopped by {signal.Signals(number).name}: no partial result was written"
    )


def _report_usage(problem: Any) -> Never:
    """Report a mistake in the arguments, and point to the help of the command that was called."""
    text = " ".join(problem.format_message().split()).rstrip(".")
    errors = getattr(problem.__cause__, "errors", None)
    if errors is not None:  # pydantic's, whose words leave out what was found
        text = text.partition(", unable to parse")[0].replace("Input", repr(errors()[0]["input"]))
    see = " See" if text.endswith("?") else ": see"
    _report(f"{text}{see} {problem.ctx.command_path} --help", problem.exit_code)


def _report(message: str, code: int) -> Never:
    """Print an error on stderr, and as a JSON object on stdout with --json; exit."""
    with contextlib.suppress(
        OSError
    ):  # stderr may be full or closed; the exit code reports the error as well
        for line in message.splitlines():  # one, but for the mistakes in a recipe
            sys.stderr.write(f"gqa-convert: {' '.join(line.split())}\n")
        sys.stderr.flush()
    if "--json" in sys.argv[1:]:
        with contextlib.suppress(OSError):
            print_json({"error": message, "exit_code": code})
    sys.exit(code)
