"""Runs the command line within this process, and keeps what a user would see."""

import contextlib
import io
import json
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

from gqa_convert.cli import main

_SECONDS = 30
"""A command that takes longer hangs."""


@dataclass(frozen=True, slots=True)
class Called:
    """How a command ended.

    Attributes:
        code: the exit code; None after an exception that nothing caught.
        out, err: what it printed; a traceback is at the end of `err`.
    """

    code: int | None
    out: str
    err: str

    @property
    def refused(self) -> bool:
        """Whether it ended as a mistake of the user has to: exit code 2, one line on stderr, and on stdout nothing, or the
        same error with --json.
        """
        if self.code != 2 or not self.err.startswith("gqa-convert: ") or self.err.count("\n") != 1:
            return False
        return self.out == "" or json.loads(self.out).keys() == {"error", "exit_code"}


class HangsError(Exception):
    """A command did not end in time."""


def _hangs(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise HangsError(f"no end within {_SECONDS} seconds")


def call(arguments: Sequence[str]) -> Called:
    """Run `gqa-convert ARGUMENTS`."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["gqa-convert", *arguments]
    signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(_SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
        return Called(code, out.getvalue(), err.getvalue())
    except BaseException:
        if (problem := sys.exc_info()[1]) is not None and isinstance(problem, KeyboardInterrupt):
            raise
        return Called(None, out.getvalue(), err.getvalue() + traceback.format_exc())
    finally:
        signal.alarm(0)
        sys.argv = before
