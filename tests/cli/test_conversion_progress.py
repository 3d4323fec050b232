"""Progress of a conversion: one bar on a terminal, elsewhere a line per layer with the time left."""

import io
import re
import sys
import time

import pytest
from rich.console import Console

from gqa_convert.checkpoint.provenance import Divergence
from gqa_convert.cli.console import conversion_progress
from gqa_convert.cli.console.layer_pace import LayerPace
from gqa_convert.conversion.fit.records import (
    CalibratedRecord,
    Stage,
    StageProgress,
    TrainingProgress,
    TrainingRecord,
)

LAYERS = 3


class Terminal(io.StringIO):
    """Stands for stderr on a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def record(number: int) -> CalibratedRecord:
    return CalibratedRecord(module=f"layers.{number}", output=0.1, gap_left=0.25, first_low_frequency_pair=None)


def fit(screen: conversion_progress.ConversionScreen, clock: list[float]) -> None:
    """Report what a conversion reports: layers of 100 seconds, then 200 steps of one second each."""
    for stage in (Stage.TEXT, Stage.SOURCE):
        screen.layer(0, LAYERS, StageProgress(stage, 0, LAYERS))
        clock[0] += 40
    for done in range(LAYERS):
        screen.layer(done, LAYERS, StageProgress(Stage.FORWARD, done + 1, LAYERS, 0, 4))
        clock[0] += 20
        screen.layer(done, LAYERS, StageProgress(Stage.STATISTICS, done + 1, LAYERS))
        clock[0] += 20
        for step in range(6):
            screen.layer(done, LAYERS, StageProgress(Stage.GRADIENT, done + 1, LAYERS, 10 * step, 60))
            clock[0] += 10
        screen.layer(done + 1, LAYERS, record(done))
    for step in range(201):
        screen.layer(LAYERS, LAYERS, TrainingProgress(step, 200))
        clock[0] += 1
    kl = Divergence(0.5, 0.25)
    screen.layer(
        LAYERS, LAYERS, TrainingRecord(kl_steps=200, kl=kl, requested_steps=None, kl_rank=0, requested_rank=None)
    )
    for _ in range(10):
        screen.written(100)


def test_without_a_terminal_a_line_per_layer(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with conversion_progress.conversion_progress(quiet=False) as screen:
        screen.will_write(1000)
        fit(screen, clock)
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert shown.out == ""
    assert lines[0] == "loading the source"
    assert [line for line in lines if line.startswith("layer") and "remains" in line] == [
        "layer 1 of 3  layers.0: 25.0% of mean pooling's error remains  0:03:20 left",
        "layer 2 of 3  layers.1: 25.0% of mean pooling's error remains  0:01:40 left",
        "layer 3 of 3  layers.2: 25.0% of mean pooling's error remains",
    ]
    together = [line for line in lines if line.startswith("all layers together")]
    assert 6 <= len(together) <= 8  # one every 30 seconds, and the result
    assert all(re.search(r"%  0:0\d:\d\d left$", line) for line in together[1:-1])
    assert together[-1].endswith("0.5000 -> 0.2500 nats per token")


def test_quiet(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with conversion_progress.conversion_progress(quiet=True) as screen:
        fit(screen, clock)
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_one_bar(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Never two bars at once, and each report changes what the bar says."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "110")
    seen: list[str] = []
    with conversion_progress.conversion_progress(quiet=False) as screen:
        bars = screen._bars
        assert bars is not None
        screen.will_write(1000)
        show = screen._show

        def shown(*arguments: object) -> None:
            show(*arguments)  # type: ignore[arg-type]
            assert sum(task.visible for task in bars.tasks) == 1
            printed = io.StringIO()
            Console(file=printed, width=110).print(bars.make_tasks_table(bars.tasks))
            seen.append(" ".join(re.sub("[━╸╺]", "", printed.getvalue()).split()))
            assert printed.getvalue().count("\n") == 1

        monkeypatch.setattr(screen, "_show", shown)
        fit(screen, clock)
    for expected in (
        "reading the text",
        "layer 1 of 3 running source and student 0 of 4",
        "layer 2 of 3 statistics",
        "layer 2 of 3 gradient steps 30 of 60",
        "all layers together step 100 of 200",
        "converting 500 bytes of 1.0 kB",
    ):
        assert any(line.startswith(expected) for line in seen), (expected, seen)
    assert next(line for line in seen if "layer 2 of 3 gradient steps 30 of 60" in line).endswith("0:02:10 left")
    assert next(line for line in seen if "step 100 of 200" in line).endswith("0:01:40 left")
    assert "layer 1 of 3  layers.0: 25.0% of mean pooling's error remains" in terminal.getvalue()


def test_layers_of_an_earlier_run_do_not_count(clock: list[float]) -> None:
    """They are run again, which takes less time than fitting them."""
    pace = LayerPace()
    for _ in range(2):
        pace.stage(fits=False)
        clock[0] += 5
        pace.layer_done()
    assert pace.left(2, 4) is None
    pace.stage(fits=False)
    pace.stage(fits=True)
    clock[0] += 60
    pace.layer_done()
    assert pace.left(3, 4) == 60.0
    clock[0] += 30
    pace.stage(fits=True)
    assert pace.left(3, 4) == 30.0
    clock[0] += 300  # the layer takes longer than others; some time is left all the same
    assert pace.left(3, 4) == pytest.approx(0.6)
