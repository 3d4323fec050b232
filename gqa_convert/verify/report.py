"""The report of a verification, and how a check states its result."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from gqa_convert.errors import ConfigError, CorruptCheckpointError, first_line

from .inputs import JsonObject


class Failure(Exception):  # noqa: N818 - a result about OUT, never shown to a user as an exception
    """A check did not hold; the message says in one line what was found."""


@dataclass(frozen=True, slots=True)
class Check:
    """One property of the converted checkpoint, and whether it holds."""

    name: str
    passed: bool
    detail: str
    """What was looked at or, if the check failed, what was found; one line."""


@dataclass
class VerificationReport:
    """The checks in the order in which they ran."""

    out: str
    source: str
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether at least one check ran and all of them hold."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    def check(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Run a check.

        Args:
            name: of the check.
            function: returns what it looked at in words, or something that has these as its text,
                or raises. On a damaged OUT any library may raise anything. Only SOURCE raises
                CorruptCheckpointError and ConfigError, and these reach the caller.
            args: its arguments.

        Returns:
            What the function returns; None if it raises.
        """
        try:
            found = function(*args)
        except (CorruptCheckpointError, ConfigError):
            raise
        except Exception as problem:
            detail = str(problem) if isinstance(problem, Failure) else first_line(problem)
            self.checks.append(Check(name, False, detail))
            return None
        self.checks.append(Check(name, True, str(found)))
        return found

    def summary(self) -> JsonObject:
        """The report as plain data for `--json`."""
        return asdict(self) | {"passed": self.passed}
