"""Computations that pause inside a call, however deeply nested, and resume later; each runs in a greenlet."""

from collections.abc import Callable
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet


class Paused:
    """A computation without gradients that runs up to its next `pause` and then waits with all its frames.

    torch keeps its gradient mode per thread, not per greenlet, so that every entry sets it and restores it.
    """

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._greenlet = greenlet(compute)

    @property
    def identity(self) -> object:
        """The value of `current()` inside the computation."""
        return self._greenlet

    @property
    def finished(self) -> bool:
        return bool(self._greenlet.dead)

    @property
    def frame(self) -> Any:
        """The innermost waiting frame; None before the start and after the end."""
        return self._greenlet.gr_frame

    def resume(self, answer: Any = None) -> Any:
        """Resume the computation until the next pause.

        Args:
            answer: the return value of the pause inside the computation; ignored by the first call.

        Returns:
            The message of the next pause, or the computation's result if it is `finished`.

        Raises:
            BaseException: any error of the computation, which ends it.
        """
        enabled = torch.is_grad_enabled()
        self._greenlet.parent = getcurrent()
        torch.set_grad_enabled(False)
        try:
            return self._greenlet.switch(answer) if self._greenlet else self._greenlet.switch()
        finally:
            torch.set_grad_enabled(enabled)

    def close(self) -> None:
        """End the computation at its pause, which runs its `finally` clauses."""
        if self._greenlet and not self._greenlet.dead:
            enabled = torch.is_grad_enabled()
            self._greenlet.parent = getcurrent()
            try:
                self._greenlet.throw(GreenletExit)
            finally:
                torch.set_grad_enabled(enabled)


def current() -> object:
    """The running greenlet."""
    return getcurrent()


def pause(message: Any) -> Any:
    """Pause and pass `message` to the caller of `resume`; returns the answer of the next `resume`."""
    parent = getcurrent().parent
    assert parent is not None, "only a paused computation may pause"
    return parent.switch(message)
