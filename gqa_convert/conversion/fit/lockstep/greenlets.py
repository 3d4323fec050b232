"""Computations that stop in the midst of a call, wherever it is nested, and go on later: one greenlet each."""

from collections.abc import Callable
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet


class Paused:
    """A computation without gradients that runs up to its next `pause`, and then waits with all its frames.

    torch's switch for gradients belongs to the thread and not to the greenlet: it is set anew on each entry.
    """

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._greenlet = greenlet(compute)

    @property
    def identity(self) -> object:
        """What `current()` returns inside."""
        return self._greenlet

    @property
    def finished(self) -> bool:
        return bool(self._greenlet.dead)

    @property
    def frame(self) -> Any:
        """The innermost frame that waits; None before the start and after the end."""
        return self._greenlet.gr_frame

    def resume(self, answer: Any = None) -> Any:
        """Go on to the next pause.

        Args:
            answer: what the pause returns inside; of no account at the first call.

        Returns:
            What the next pause was given, or the computation's result once `finished`.

        Raises:
            BaseException: whatever the computation raises; it is finished then.
        """
        enabled = torch.is_grad_enabled()
        self._greenlet.parent = getcurrent()
        torch.set_grad_enabled(False)
        try:
            return self._greenlet.switch(answer) if self._greenlet else self._greenlet.switch()
        finally:
            torch.set_grad_enabled(enabled)

    def close(self) -> None:
        """End it where it waits, which runs its `finally` clauses."""
        if self._greenlet and not self._greenlet.dead:
            enabled = torch.is_grad_enabled()
            self._greenlet.parent = getcurrent()
            try:
                self._greenlet.throw(GreenletExit)
            finally:
                torch.set_grad_enabled(enabled)


def current() -> object:
    """The greenlet that runs."""
    return getcurrent()


def pause(message: Any) -> Any:
    """Stop here and hand `message` to whoever resumed this computation; returns what it is resumed with."""
    parent = getcurrent().parent
    assert parent is not None, "only a paused computation may pause"
    return parent.switch(message)
