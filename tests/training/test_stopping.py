"""Signals that come where a run can't save."""

import os
import signal
import sys

import pytest

from gqa_convert.errors import DataError, StoppedError
from gqa_convert.training.distributed import taking_part
from gqa_convert.training.stopping import StopRequests


def stopped_and_turned_into(error: Exception | None) -> None:
    with StopRequests():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except StoppedError as stopped:
            raise error or stopped from None


def test_a_signal_is_an_error_at_once() -> None:
    """Also if the code that it interrupts makes another error of it, unless that has a line of its own."""
    with pytest.raises(StoppedError, match="SIGINT between two stages"):
        stopped_and_turned_into(None)
    with pytest.raises(StoppedError, match="SIGINT between two stages"):
        stopped_and_turned_into(ImportError("torch is half there"))
    with pytest.raises(DataError):
        stopped_and_turned_into(DataError("no text"))


def test_leaving_does_not_import_torch_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # to import it is an error now
    with pytest.raises(StoppedError, match="early"), taking_part():
        raise StoppedError("early")
