"""Signals that come where a run can't save."""

import os
import signal
import sys

import pytest

from gqa_convert.errors import DataError, StoppedError
from gqa_convert.training.distributed import taking_part
from gqa_convert.training.stopping import StopRequests


def test_a_signal_is_an_error_at_once() -> None:
    with pytest.raises(StoppedError, match="SIGTERM between two stages"), StopRequests():
        os.kill(os.getpid(), signal.SIGTERM)


def turn_into(error: Exception) -> None:
    with StopRequests():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except StoppedError:
            raise error from None


def test_what_was_interrupted_may_make_another_error_of_it() -> None:
    with pytest.raises(StoppedError, match="SIGINT between two stages"):
        turn_into(ImportError("torch is half there"))


def test_errors_with_a_line_of_their_own_stay() -> None:
    with pytest.raises(DataError):
        turn_into(DataError("no text"))


def test_leaving_does_not_import_torch_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # to import it is an error now
    with pytest.raises(StoppedError, match="early"), taking_part():
        raise StoppedError("early")
