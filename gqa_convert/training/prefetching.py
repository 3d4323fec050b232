"""Reads what the next step needs while a step computes."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import Generic, TypeVar

T = TypeVar("T")
_LOOK = 0.2  # seconds


class ReadAhead(Generic[T]):
    """One item at a time, in a thread that the end of the process does not wait for: text from a network may never
    come.

    Args:
        read: makes the item of a number.
    """

    def __init__(self, read: Callable[[int], T]) -> None:
        self._read = read
        self._answer: Future[T] = Future()

    def ask(self, number: int) -> None:
        """Begin to read an item."""
        self._answer = Future()
        Thread(target=self._run, args=(number, self._answer), name=f"reading {number}", daemon=True).start()

    def take(self, stop: Callable[[], bool]) -> tuple[T | None, Exception | None]:
        """The item that was asked for, or what went wrong; neither if `stop` holds before it is there."""
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
