"""What a verification found."""

from dataclasses import dataclass, field
from typing import Any


class Failure(Exception):  # noqa: N818 - a finding about OUT, never seen by a user
    """A check did not hold; the message is its one-line detail."""


@dataclass(frozen=True, slots=True)
class Check:
    """One property of the converted checkpoint: whether it holds, and what was looked at or found."""

    name: str
    passed: bool
    detail: str


@dataclass
class VerificationReport:
    """The checks in the order in which they ran."""

    out: str
    source: str
    checks: list[Check] = field(default_factory=list)
    losses: dict[str, float] | None = None
    """With a text: nats per token of `source` and of `out`, and the number of `tokens` scored. Reported, not judged."""

    @property
    def passed(self) -> bool:
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
