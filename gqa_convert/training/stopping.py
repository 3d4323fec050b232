"""Signals that ask a run to stop, as schedulers, terminals and people send them."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from gqa_convert.errors import GQAConvertError, InterruptedRunError, StoppedError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class StopRequests:
    """A context in which these signals raise an error at once, or wait for the end of a step.

    Before the first step and after the last one, nothing is lost, and a signal raises StoppedError. Within
    `at_boundaries`, a signal is only recorded, and a second Ctrl-C raises InterruptedRunError.

    Attributes:
        names: of the signals that came.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._patient = False
        self._stopped: StoppedError | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequests":
        if threading.current_thread() is threading.main_thread():  # no other can have handlers
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._stopped is not None and isinstance(error, Exception) and not isinstance(error, GQAConvertError):
            raise self._stopped from None  # what was interrupted, an import say, has made another error of it

    @contextmanager
    def at_boundaries(self) -> Iterator[None]:
        """While this context lasts, requests wait."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False

    def __bool__(self) -> bool:
        return bool(self.names)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        name = signal.Signals(number).name
        again = name == "SIGINT" and name in self.names
        self.names.append(name)
        if again:
            raise InterruptedRunError(
                "stopped at once by a second Ctrl-C: run the same command again to resume from the last checkpoint"
            )
        if not self._patient:
            self._stopped = StoppedError(
                f"stopped by {name} between two stages, with nothing to save: run the same command again to resume"
            )
            raise self._stopped
