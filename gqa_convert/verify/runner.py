"""Runs the checks of a verification one by one."""

from collections.abc import Callable
from typing import TypeVar

from gqa_convert.errors import ConfigError, CorruptCheckpointError
from gqa_convert.verify.checkpoint_reader import first_line
from gqa_convert.verify.report import Check, Failure, Finding, VerificationReport

T = TypeVar("T")
OnCheck = Callable[[Check], None]


class CheckRunner:
    """Adds the result of each check to a report.

    Args:
        report: receives the results.
        on_check: called as each check ends.
    """

    def __init__(self, report: VerificationReport, on_check: OnCheck) -> None:
        self.report = report
        self._on_check = on_check

    def check(self, name: str, function: Callable[[], Finding]) -> bool:
        """Run one check and return whether it holds.

        `function` returns a finding or raises Failure. On a damaged OUT any library may raise anything, which fails the
        check too. Only SOURCE raises CorruptCheckpointError and ConfigError, and these reach the caller.
        """
        try:
            finding = function()
            check = Check(name, True, finding.detail, finding.numbers)
        except Failure as failure:
            check = Check(name, False, str(failure), failure.numbers)
        except (CorruptCheckpointError, ConfigError):
            raise
        except Exception as problem:
            check = Check(name, False, first_line(problem))
        self.report.checks.append(check)
        self._on_check(check)
        return check.passed

    def read(self, name: str, read: Callable[[], T], judge: Callable[[T], Finding]) -> T | None:
        """Run one check that reads something and then judges it.

        Returns:
            What was read, whether or not it passed; None if it could not be read.
        """
        found: list[T] = []

        def function() -> Finding:
            found.append(read())
            return judge(found[0])

        self.check(name, function)
        return found[0] if found else None
