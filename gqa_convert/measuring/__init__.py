"""Measures what a conversion costs and gains: losses on text, the cost of merging before it is done, decode time."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, the steps done and the number of steps."""
StageProgress = Callable[[int, int], None]
"""Called with the steps of a stage that are done, and their number."""


def no_progress(*_: object) -> None:
    """Shows nothing."""
