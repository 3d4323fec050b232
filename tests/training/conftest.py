"""Fixtures of the tests of uptraining."""

from collections.abc import Sequence
from typing import Any

import pytest

_DRAWN: list[bytes | None] = []


@pytest.fixture(autouse=True)
def one_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing a curve takes as long as several steps: the first run draws its own, and later ones write its picture."""
    from gqa_convert.training import run  # imports torch
    from gqa_convert.training.curve import draw_curve

    def draw_once(lines: Sequence[Any], evaluations: dict[str, float]) -> bytes | None:
        if not _DRAWN:
            _DRAWN.append(draw_curve(lines, evaluations))
        return _DRAWN[0]

    monkeypatch.setattr(run, "draw_curve", draw_once)
