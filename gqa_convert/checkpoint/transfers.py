"""Moves several files at once to or from an object store, in threads that an error or a signal abandons."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Event, Semaphore, Thread
from typing import Any, TypeVar

T = TypeVar("T")

OnBytes = Callable[[int, int], None]
"""Called with the bytes that were moved, and with all that are to be moved."""

FETCHING, UPLOADING = "fetching", "uploading"
"""The names of both directions in progress reports."""

_AT_ONCE = 4
"""Files that are moved at the same time; s3fs holds up to ten parts of 50 MB of each in memory."""

_PATIENCE_SECONDS = 2
"""How long a call that fails waits for the files that are being moved, which end at their next report of progress."""


class _Abandoned(Exception):  # noqa: N818 - ends a thread whose result is no longer wanted
    pass


def move_files(
    names: Sequence[str],
    move: Callable[[str, Any], T],
    nbytes: int,
    on_bytes: OnBytes,
    moved: Callable[[str, T], None] = lambda name, result: None,
) -> None:
    """Move files, several at once, and return when all are moved.

    An error or a signal ends the call soon: what is being moved then is abandoned, and no other file is begun.

    Args:
        names: of the files.
        move: called in a thread with a name and with an fsspec callback.
        nbytes: the size of all files.
        on_bytes: called in the caller's thread.
        moved: called in the caller's thread with each name whose file is moved, and what `move` returned.

    Raises:
        Exception: the first one that a call of `move` raised.
    """
    from fsspec.callbacks import Callback

    news: SimpleQueue[Callable[[], int]] = SimpleQueue()
    """Functions that return the bytes that were moved since the one before, or raise what went wrong."""
    stop, places = Event(), Semaphore(_AT_ONCE)
    left = len(names)

    def run(name: str) -> None:
        counted = 0

        def count(size: int | None, value: int, **_: Any) -> None:
            nonlocal counted
            del size
            if stop.is_set():
                raise _Abandoned
            news.put(partial(int, value - counted))
            counted = value

        with places:
            try:
                if not stop.is_set():
                    news.put(partial(finish, name, move(name, Callback(hooks={"count": count}))))
            except BaseException as problem:
                news.put(partial(_raise, problem))

    def finish(name: str, result: T) -> int:
        nonlocal left
        left -= 1
        moved(name, result)
        return 0

    done = 0
    # daemons do not keep a program that was interrupted from ending
    threads = [Thread(target=run, args=(name,), daemon=True) for name in names]
    try:
        for thread in threads:
            thread.start()
        while left:
            done += news.get()()
            on_bytes(min(done, nbytes), nbytes)
    finally:
        stop.set()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        while not news.empty():  # after an error: what was moved meanwhile
            with suppress(Exception):
                news.get()()


def _raise(problem: BaseException) -> int:
    raise problem
