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
        if self._began is None:
            self._began = time.monotonic(), done
        began, first = self._began
        if not first < done < total:
            return ""
        seconds = round((time.monotonic() - began) / (done - first) * (total - done))
        days, hours = divmod(seconds // 3600, 24)
        clock = f"{hours}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        return f"{days} d {clock} left" if days else f"{clock} left"


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
        if time.monotonic() - self._shown < SECONDS or not total:
            return
        self._shown = time.monotonic()
        self._say("  ".join(filter(None, [f"{stage}: {done / total:.1%}", left])))
