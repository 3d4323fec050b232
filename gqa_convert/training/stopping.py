"""Handles signals that request a run to stop, from schedulers, terminals and users."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gqa_convert.errors import GQAConvertError, InterruptedRunError, StoppedError


class StopRequests:
    """A context in which these signals raise an error immediately or at the end of a step.

    Before the first step and after the last one, a signal raises StoppedError immediately, because
    nothing would be lost. Within `at_boundaries`, a signal is only recorded, and a second Ctrl-C
    raises InterruptedRunError.

    Attributes:
        names: the signals received.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._patient = False
        self._stopped: StoppedError | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequests":
        if (
            threading.current_thread() is threading.main_thread()
        ):  # only the main thread can have handlers
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, _: Any, error: Any, __: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if (
            self._stopped
            and isinstance(error, Exception)
            and not isinstance(error, GQAConvertError)
        ):
            # the interrupted code, such as an import, has replaced the exception
            raise self._stopped from None

    @contextmanager
    def at_boundaries(self) -> Iterator[None]:
        """A context in which requests are only recorded."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False

    def _note(self, number: int, _: Any) -> None:
        name = signal.Signals(number).name
        again = name == "SIGINT" and name in self.names
        self.names.append(name)
        if again:
            raise InterruptedRunError(
                "stopped at once by a second Ctrl-C: run the same command again to resume from the "
                "last checkpoint"
            )
        if not self._patient:
            self._stopped = StoppedError(
                f"stopped by {name} between two stages, with nothing to save: run the same command "
                "again to resume"
            )
            raise self._stopped
