"""What can come of a case, and the table of how often it did."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from benchmarks.pages import table


class Outcome(StrEnum):
    """How a case ended. The last five are bugs."""

    RIGHT = "accepted and right"
    REFUSED = "one line, exit code 2"
    WRONG = "accepted and wrong"
    TRACEBACK = "traceback"
    OTHER = "another exit code or message"
    HALF_WRITTEN = "half-written result"
    SOURCE_CHANGED = "changed source"


class KillOutcome(StrEnum):
    """What a killed command left behind, and what the same command made of it. The last three are bugs."""

    NOTHING = "no result; the next run is right"
    WHOLE = "whole result"
    HALF_WRITTEN = "half-written result"
    WRONG = "the next run is wrong or fails"
    SOURCE_CHANGED = "changed source"


BUGS = frozenset(list(Outcome)[2:]) | frozenset(list(KillOutcome)[2:])


@dataclass(frozen=True, slots=True)
class Case:
    """One case.

    Attributes:
        subject: what was mutated, or the command that was killed.
        name: what reproduces it: the seed and number of a mutation, or the moment of a kill.
        outcome: how it ended.
        detail: the message or the traceback of a bug.
    """

    subject: str
    name: str
    outcome: Outcome | KillOutcome
    detail: str = ""


Counts = dict[str, dict[str, int]]
"""How often each outcome came of each subject's cases."""


def counts(cases: Iterable[Case]) -> Counts:
    found: Counts = {}
    for case in cases:
        row = found.setdefault(case.subject, {})
        row[case.outcome] = row.get(case.outcome, 0) + 1
    return found


def count_table(rows: Counts, kinds: type[Outcome] | type[KillOutcome], what: str) -> str:
    """A Markdown table with a row for each subject and a column for each outcome."""
    lines = [
        [subject, f"{sum(row.values()):,}", *(f"{row.get(kind, 0):,}" for kind in kinds)]
        for subject, row in (rows | {"all": dict(sum(map(Counter, rows.values()), Counter()))}).items()
    ]
    return table([what, "cases", *(kind.value for kind in kinds)], lines)
