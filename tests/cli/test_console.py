"""What people see: results in terminals, files and pipes of any encoding, progress, and numbers of
tokens.
"""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from safetensors.numpy import load_file, save_file

from gqa_convert.checkpoint.provenance import Divergence
from gqa_convert.cli.console import screen as progress
from gqa_convert.cli.console.conversion import ConversionScreen
from gqa_convert.cli.console.screen import show_table
from gqa_convert.cli.options import count, counts
from gqa_convert.conversion.layers.layer_store import LayerRecord
from gqa_convert.conversion.progress import ALL_TOGETHER, MERGING_LAYERS, OWN_TEXT, FitProgress
from tests.helpers.checkpoints import write_llama
from tests.helpers.command_line import run
from tests.helpers.evaluate_models import causal

NAME = "[bold]x[/] :warning: é ±"
"""Looks like markup, and like an emoji's code; and no ASCII."""


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of rich's bars."""
    clock = Clock()
    monkeypatch.setattr("rich.console.monotonic", clock.monotonic)
    return clock


def test_work_of_an_earlier_process_does_not_count(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run begins at half of its steps: the pace is that of the rest."""
    with progress.ProgressScreen() as screen:
        screen.show("fitting", 50, 100)
        clock.now += 10
        screen.show("fitting", 60, 100)
        clock.now += 30
        screen.show("fitting", 90, 100)
        screen.tell()
        screen.show("an empty stage", 0, 0)
        screen.tell()
    assert capsys.readouterr().err.splitlines() == ["fitting: 90.0%  0:00:10 left"]


def shown_by(
    screen_of: type[progress.ProgressScreen],
    clock: Clock,
    capsys: pytest.CaptureFixture[str],
    *calls: tuple[str, tuple[object, ...]],
) -> str:
    """Return what a screen prints that tells of the work after every call, 31 seconds after the
    one before.
    """
    with screen_of() as screen:
        for name, arguments in calls:
            clock.now += 31
            getattr(screen, name)(*arguments)
            screen.tell()
    return capsys.readouterr().err


def plan_of(config: dict[str, Any]) -> SimpleNamespace:
    """What the screen reads of a plan."""
    return SimpleNamespace(weight_bytes_after=4_000_000, checkpoint=SimpleNamespace(config=config))


def test_a_model_that_hears_is_told_of_sounds(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = FitProgress(MERGING_LAYERS, 2, 2, layer=LayerRecord("a", {}, [0], 1.5))
    whisper = {"architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": True}
    calls = ("plan", (plan_of(whisper),)), ("layer", (lost,))
    shown = shown_by(ConversionScreen, clock, capsys, *calls)
    assert "name more sounds like the model's" in shown


def test_the_stages_of_a_conversion(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    layer = LayerRecord("layers.0.self_attn", {}, [0], 0.25)
    lost = LayerRecord("layers.1.self_attn", {}, [0], 1.5)
    from_weights = LayerRecord("m", {}, [0])
    trained = Divergence(0.5, 0.125, "1,024 held-out tokens of text.txt")
    alike = Divergence(0.5, 0.5, "9 held-out tokens of text.txt")
    shown = shown_by(
        ConversionScreen,
        clock,
        capsys,
        ("layer", (FitProgress(OWN_TEXT, 10, 40),)),
        ("layer", (FitProgress(MERGING_LAYERS, 0, 2, "loading the source"),)),
        ("layer", (FitProgress(MERGING_LAYERS, 1, 2, layer=layer),)),
        ("layer", (FitProgress(MERGING_LAYERS, 2, 2, layer=lost),)),
        ("layer", (FitProgress(MERGING_LAYERS, 2, 2, layer=from_weights),)),
        ("layer", (FitProgress(ALL_TOGETHER, 2, 8, "step 2 of 8, KL 0.400"),)),
        ("layer", (FitProgress(ALL_TOGETHER, 8, 8, kl=trained),)),
        ("layer", (FitProgress(ALL_TOGETHER, 8, 8, kl=alike),)),
        ("plan", (plan_of({}),)),
        ("written", (1_000_000,)),
    )
    assert shown.splitlines() == [
        "generating text: 25.0%",
        "merging layers: 0.0%  loading the source",
        "layer 1 of 2  layers.0.self_attn: 25.0% of mean pooling's error remains",
        "merging layers: 50.0%",
        "layer 2 of 2  layers.1.self_attn: 150.0% of mean pooling's error remains",
        (
            "note: pooling loses less in that layer: name more text like the model's, or keep more "
            "heads there"
        ),
        "merging layers: 100.0%",
        "merging layers: 100.0%",
        "all layers together: 25.0%  step 2 of 8, KL 0.400",
        (
            "KL divergence from the source: 0.5000, by training all layers together 0.1250 nats "
            "per token on 1,024 held-out tokens of text.txt"
        ),
        "all layers together: 100.0%",
        "KL divergence from the source: 0.5000 nats per token on 9 held-out tokens of text.txt",
        "all layers together: 100.0%",
        "all layers together: 100.0%",
        "converting: 25.0%",
    ]


def test_a_long_step_is_told_of_again_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.5)
    with progress.ProgressScreen() as screen:
        screen.show("merging layers", 1, 4, "layer 2: head order")
        time.sleep(1.7)
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 4
    assert set(lines) == {"merging layers: 25.0%  layer 2: head order"}
    time.sleep(1.2)
    assert capsys.readouterr().err == "", "nothing once the work has ended"


def test_numbers_of_tokens_are_read_and_printed_in_powers_of_1000() -> None:
    read = {
        "4096": 4096,
        "4k": 4000,
        "4K": 4000,
        "1.5k": 1500,
        "2M": 2_000_000,
        "1B": 10**9,
        "1_000": 1000,
    }
    for text, number in read.items():
        assert count(text) == number
    assert counts("512,4k") == [512, 4000]
    for text in ("", "k", "4q", "1.5", "0.0001k", "4k,8k"):
        with pytest.raises(typer.BadParameter, match="write it like 8, 4096, 4k or 2M"):
            count(text)


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_cells_stay_whole_however_narrow_a_terminal_is(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real names and shapes: of Whisper, of T5, and of an evaluation with KL."""
    monkeypatch.setenv("COLUMNS", str(columns))
    change = {
        "before": "[1280, 1280]",
        "after": "[1280, 320]",
        "type": "BF16",
        "method": "factor",
        "layers": "32",
    }
    names = ("layer.1.EncDecAttention.k.weight", "encoder_attn.out_proj.weight")
    losses = {
        "K/V/token": "524.3 kB",
        "loss": "2.4712 ±0.0213",
        "bits/byte": "0.7312",
        "KL": "0.1721 ±0.0034",
    }
    difference = {"model": "Llama-2-7b-gqa8", "difference": "+0.1187 ±0.0031"}
    for rows in ([{"tensor": name, **change} for name in names], [difference | losses]):
        show_table("", rows)
        shown = capsys.readouterr().out.splitlines()
        assert max(map(len, shown)) <= columns
        for cell in (cell for row in rows for item in row.items() for cell in item):
            assert any(cell in line for line in shown), f"{cell} is broken over lines, or left out"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_llama(tmp_path / NAME)


def test_names_are_printed_as_they_are(source: Path, tmp_path: Path) -> None:
    planned = run("convert", source, "--kv-heads", 4, "--dry-run")
    assert planned.stdout.startswith(f"{source}: llama, 12 query heads")
    out = tmp_path / "[red]out[/]"
    converted = run("convert", f"{source}/", f"{out}/", "--kv-heads", 4, "-m", "mean")
    assert f"folder               {out}\n" in converted.stdout
    (out / "[red].json").write_text("{}")
    shown = run("verify", out, "--source", source, "--no-logits").stdout
    assert re.search(r"FAIL  copied files .*: \[red\]\.json is .*, expected nothing", shown), shown
    missing = run("convert", tmp_path / "no[/]thing", "--kv-heads", 4, "--dry-run")
    assert str(tmp_path / "no[/]thing") in missing.stderr


def shell(words: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    """A command of the shell in which `plan` stands for this program's, with pipes whose first
    failure counts.
    """
    plan = f'"{sys.executable}" -m gqa_convert convert "$1" --kv-heads 4 --dry-run'
    command = f"plan() {{ {plan}; }}; set -o pipefail; {words}"
    return subprocess.run(
        ["bash", "-c", command, "bash", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_streams_that_are_closed_or_full(source: Path) -> None:
    for words in ('plan "$1" >&-', 'plan "$1" 2>&-', 'plan "$1" | true', 'plan "$1" >&- 2>&-'):
        ended = shell(words, source)
        assert (ended.returncode, ended.stderr) == (0, ""), words
    full = shell('plan "$1" > /dev/full', source)
    assert full.returncode == 1
    assert full.stderr == "gqa-convert: the system: No space left on device\n"


def test_what_transformers_would_report_is_one_line(tmp_path: Path) -> None:
    """A tensor that is missing, and one of another shape."""
    model = causal(tmp_path / "model")
    (tmp_path / "text.txt").write_text("def f(x):\n    return x\n" * 50)
    tensors = load_file(model / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    for options in ((), ("--json",)):
        broken = run("evaluate", model, "--data", tmp_path / "text.txt", *options)
        assert broken.returncode == 2
        assert broken.stderr == (
            f"gqa-convert: {model} has no fitting tensor for model.norm.weight (1 in all): "
            "convert or fetch it again\n"
        )
    assert json.loads(broken.stdout)["exit_code"] == 2
    save_file(
        tensors | {"model.norm.weight": norm[1:]},
        model / "model.safetensors",
        metadata={"format": "pt"},
    )
    broken = run("evaluate", model, "--data", tmp_path / "text.txt")
    assert (
        f"model.norm.weight, which is [{len(norm) - 1}] where the model needs [{len(norm)}]"
        in broken.stderr
    )
    assert broken.stderr.count("\n") == 1
