"""Reads the data of the next step while the current step computes."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import Generic, TypeVar

T = TypeVar("T")
_LOOK = 0.2  # seconds


class ReadAhead(Generic[T]):
    """Reads one item at a time in a daemon thread, so that text that never arrives from a network does not keep the
    process alive.

    Args:
        read: reads the item with a given number.
    """

    def __init__(self, read: Callable[[int], T]) -> None:
        self._read = read
        self._answer: Future[T] = Future()

    def ask(self, number: int) -> None:
        """Start reading an item."""
        self._answer = Future()
        Thread(target=self._run, args=(number, self._answer), name=f"reading {number}", daemon=True).start()

    def take(self, stop: Callable[[], bool]) -> tuple[T | None, Exception | None]:
        """The requested item, or the error of reading it; neither if `stop` returns true first."""
        while not wait([self._answer], timeout=_LOOK).done:
            if stop():
                return None, None
        try:
            return self._answer.result(), None
        except Exception as problem:
            return None, problem

    def _run(self, number: int, answer: "Future[T]") -> None:
        try:
            answer.set_result(self._read(number))
        except BaseException as problem:
            answer.set_exception(problem)
