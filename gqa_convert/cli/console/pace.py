"""How fast work advances, and lines that say so where there is no terminal for a bar."""

import time
from collections.abc import Callable
from typing import Final

SECONDS: Final = 30.0
"""Between two lines on the same work."""


class Pace:
    """The pace of this process; work of an earlier, interrupted process does not count."""

    def __init__(self) -> None:
        self._began: tuple[float, int] | None = None

    def left(self, done: int, total: int) -> str:
        """Return the time left as text, or nothing where it is not known."""
        seconds = self.seconds(done, total)
        return "" if seconds is None else f"{clock(seconds)} left"

    def seconds(self, done: int, total: int) -> float | None:
        """Return the time left in seconds; None where it is not known."""
        if self._began is None:
            self._began = time.monotonic(), done
        began, first = self._began
        if not first < done < total:
            return None
        return (time.monotonic() - began) / (done - first) * (total - done)


def clock(seconds: float) -> str:
    """Format a time: 0:02:05, 3 d 4:00:00."""
    whole = round(max(0.0, seconds))
    days, hours = divmod(whole // 3600, 24)
    text = f"{hours}:{whole // 60 % 60:02}:{whole % 60:02}"
    return f"{days} d {text}" if days else text


class ProgressLines:
    """At most one line every 30 seconds, and none about work that takes less, so that a log stays short.

    Args:
        say: called with each line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._paces: dict[str, Pace] = {}
        self._shown = time.monotonic()

    def advance(self, stage: str, done: int, total: int) -> None:
        """Note that `done` of `total` units of a stage are complete."""
        left = self._paces.setdefault(stage, Pace()).left(done, total)
        if total:
            self.note(f"{stage}: {done / total:.1%}", left)

    def note(self, text: str, left: str = "") -> None:
        """Say a text and the time left, unless another line was said less than 30 seconds ago."""
        if time.monotonic() - self._shown < SECONDS:
            return
        self._shown = time.monotonic()
        self._say("  ".join(filter(None, [text, left])))
