"""The report of a verification, and how a check states its result."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class Failure(Exception):  # noqa: N818 - a result about OUT, never shown to a user as an exception
    """A check did not hold.

    Args:
        detail: what was found, in one line.
        numbers: what was measured, by name.
    """

    def __init__(self, detail: str, numbers: Mapping[str, float] | None = None) -> None:
        super().__init__(detail)
        self.numbers = numbers or {}


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check that holds looked at."""

    detail: str
    """One line."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Counts and measurements by name."""


@dataclass(frozen=True, slots=True)
class Check:
    """One property of the converted checkpoint, and whether it holds."""

    name: str
    passed: bool
    detail: str
    """What was looked at or, if the check failed, what was found; one line."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Counts and measurements by name."""


@dataclass
class VerificationReport:
    """The checks in the order in which they ran."""

    out: str
    source: str
    checks: list[Check] = field(default_factory=list)
    losses: dict[str, float] | None = None
    """With a text: nats per token of `source` and of `out`, and the number of `tokens` scored. No check judges them."""

    @property
    def passed(self) -> bool:
        """Whether at least one check ran and all of them hold."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    def summary(self) -> dict[str, Any]:
        """The report as plain data for `--json`."""
        return {
            "out": self.out,
            "source": self.source,
            "passed": self.passed,
            "checks": [{"name": c.name, "passed": c.passed, "detail": c.detail} for c in self.checks],
            "losses": self.losses,
        }
