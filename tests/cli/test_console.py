"""What people see: tables, progress with and without a terminal, and numbers of tokens."""

from types import SimpleNamespace

import pytest
import typer

from gqa_convert.checkpoint.provenance import Divergence
from gqa_convert.cli.console import progress
from gqa_convert.cli.console.conversion_progress import ConversionScreen
from gqa_convert.cli.console.screen import tokens_text
from gqa_convert.cli.options import token_count, token_counts
from gqa_convert.conversion.fit.layer_store import LayerRecord
from gqa_convert.conversion.fit.progress import ALL_TOGETHER, MERGING_LAYERS, OWN_TEXT, FitProgress


class Clock:
    """Stands for the time module, whose clock stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of lines and of rich's bars."""
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr("rich.console.monotonic", clock.monotonic)
    return clock


def test_work_of_an_earlier_process_does_not_count(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """A resumed run begins at half of its steps: the pace is that of the rest."""
    with progress.ProgressScreen(quiet=False) as screen:
        screen.show("fitting", 50, 100)
        clock.now += 10
        screen.show("fitting", 60, 100)
        clock.now += 30
        screen.show("fitting", 90, 100)
        screen.show("an empty stage", 0, 0)
    assert capsys.readouterr().err.splitlines() == ["fitting: 90.0%  0:00:10 left"]


def shown_by(screen_of: type, clock: Clock, capsys: pytest.CaptureFixture[str], *calls: tuple[str, object]) -> str:
    """Return what a screen prints where every call is 31 seconds after the one before."""
    with progress.ProgressScreen(quiet=False) as lines:
        screen = screen_of(lines)
        for name, arguments in calls:
            clock.now += 31
            getattr(screen, name)(*arguments)
    return capsys.readouterr().err


def test_the_stages_of_a_conversion(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    layer = LayerRecord("layers.0.self_attn", {}, [0], 0.25)
    from_weights = LayerRecord("m", {}, [0])
    trained = Divergence(0.5, 0.125)
    shown = shown_by(
        ConversionScreen,
        clock,
        capsys,
        ("layer", (FitProgress(OWN_TEXT, 10, 40),)),
        ("layer", (FitProgress(MERGING_LAYERS, 0, 2, "loading the source"),)),
        ("layer", (FitProgress(MERGING_LAYERS, 1, 2, layer=layer),)),
        ("layer", (FitProgress(MERGING_LAYERS, 2, 2, layer=from_weights),)),
        ("layer", (FitProgress(ALL_TOGETHER, 2, 8, "step 2 of 8, KL 0.400"),)),
        ("layer", (FitProgress(ALL_TOGETHER, 8, 8, kl=trained),)),
        ("plan", (SimpleNamespace(weight_bytes_after=4_000_000),)),
        ("written", (1_000_000,)),
    )
    assert shown.splitlines() == [
        "generating text: 25.0%",
        "merging layers: 0.0%  loading the source",
        "merging layers: 50.0%",
        "layer 1 of 2  layers.0.self_attn: 25.0% of mean pooling's error remains",
        "merging layers: 100.0%",
        "all layers together: 25.0%  step 2 of 8, KL 0.400",
        "all layers together: 100.0%",
        "all layers together: KL divergence from the source 0.5000 -> 0.1250 nats per token",
        "converting: 25.0%",
    ]


def test_numbers_of_tokens_are_read_and_printed_in_powers_of_1000() -> None:
    read = {"4096": 4096, "4k": 4000, "4K": 4000, "1.5k": 1500, "2M": 2_000_000, "1B": 10**9, "1_000": 1000}
    for text, count in read.items():
        assert token_count(text) == count
    assert token_counts("512,4k") == [512, 4000]
    for text in ("", "k", "4q", "1.5", "0.0001k", "4k,8k"):
        with pytest.raises(typer.BadParameter, match="write it like 4096, 4k or 2M"):
            token_count(text)
    shown = {0: "0", 512: "512", 999: "999", 1000: "1k", 4096: "4.1k", 24_576: "24.6k", 131_072: "131k"}
    shown |= {999_499: "999k", 999_500: "1M", 2_000_000: "2M", 20_004_864: "20M", 10**10: "10B", 15 * 10**12: "15T"}
    for count, text in shown.items():
        assert tokens_text(count) == text
