"""Numbers of bytes and lists of names, as messages have them."""

from collections.abc import Sequence

_NAMED = 3
"""Number of files that a message names; it counts the rest."""


def size(nbytes: float) -> str:
    """Format bytes: 1.2 GB, 98.3 kB."""
    if abs(nbytes) < 1000:
        return f"{nbytes:,.0f} bytes"
    for unit in ("kB", "MB", "GB"):  # noqa: B007
        nbytes /= 1000
        if abs(nbytes) < 1000:
            break
    return f"{nbytes:,.1f} {unit}"


def some(names: Sequence[str]) -> str:
    """Return the first names of a list and the number of the others, for a message."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def about(hours: float) -> str:
    """Format an estimate of time by one digit: about 2 hours, about 40 minutes."""
    unit, count = ("hour", hours) if hours >= 1 else ("minute", max(1.0, 60 * hours))
    rounded = float(f"{count:.0e}")
    return f"about {rounded:,.0f} {unit}{'' if rounded == 1 else 's'}"
