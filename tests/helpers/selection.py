"""Which cases of a test every run takes, and which `pytest -m slow` takes."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(every_run: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Cases for `parametrize`, of which those outside `every_run` are marked slow."""
    return [
        case if case in every_run else pytest.param(case, marks=pytest.mark.slow) for case in cases
    ]
