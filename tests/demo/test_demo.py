"""The demo on the bundled checkpoint, and the checkpoint itself."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gqa_convert.checkpoint.provenance import PROVENANCE
from gqa_convert.cli import demo as demo_command
from gqa_convert.conversion.calibration import streams
from gqa_convert.data import folders, sources
from gqa_convert.demo import CHECKPOINT, run_demo
from gqa_convert.errors import OutputError


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The demo with a few of the training files, and less text for every stage."""
    out = tmp_path_factory.mktemp("demo") / "out"

    def some_files(held_out: bool) -> list[Path]:
        return folders.source_files(held_out=held_out)[:: 4 if held_out else 40]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(out.parent / "cache"))
        patch.setattr(sources, "source_files", some_files)
        patch.setattr(streams, "LENGTH", 128)
        yield (
            out,
            run_demo(
                out, calibration_tokens=1024, held_out_tokens=2048, uptraining_tokens=3 * 4096
            ),
        )


def test_the_bundled_checkpoint_is_small() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) < 6_000_000
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["num_key_value_heads"] == config["num_attention_heads"] == 12
    assert config["head_dim"] * 12 != config["hidden_size"]


@pytest.mark.slow
def test_the_demo_runs_the_whole_workflow(demo: tuple[Path, dict[str, Any]]) -> None:
    out, summary = demo
    source, mean, fit, uptrained = summary["results"]
    assert [row["name"] for row in summary["results"]] == [
        "source",
        "mean",
        "fit",
        "fit, uptrained",
    ]
    assert [row["kv_heads"] for row in summary["results"]] == [12, 3, 3, 3]
    assert [row["kv_bytes_per_token"] for row in summary["results"]] == [
        5 * 2 * 32 * 2 * n for n in (12, 3, 3, 3)
    ]
    assert [row["verified"] for row in summary["results"]] == [None, True, True, None]
    assert summary["passed"]
    assert summary["held_out_tokens"] == 2048
    assert 1.5 < source["loss"] < 2.7, "the checkpoint was trained; a uniform guess would lose 7.6"
    assert (
        source["loss"]
        < uptrained["loss"]
        < fit["loss"]
        < source["loss"] + 0.4 * (mean["loss"] - source["loss"])
    )
    for row, method in ((mean, "mean"), (fit, "fit")):
        assert json.loads((Path(row["model"]) / PROVENANCE).read_text())["method"] == method
        assert Path(row["model"]).parent == out
    assert (Path(uptrained["model"]) / "model.safetensors").is_file()
    with pytest.raises(OutputError, match="exists already: name a new folder"):
        run_demo(out)


def test_the_table_of_the_demo(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    row = {
        "model": "out/mean",
        "kv_heads": 3,
        "kv_bytes_per_token": 1920.0,
        "loss": 4.5,
        "verified": False,
    }
    source = row | {
        "name": "source",
        "kv_heads": 12,
        "kv_bytes_per_token": 7680.0,
        "loss": 2.25,
        "verified": None,
    }
    counts = {"held_out_tokens": 40_000, "calibration_tokens": 20_480, "uptraining_tokens": 122_880}
    monkeypatch.setattr(
        "gqa_convert.demo.run_demo",
        lambda *_, **__: counts | {"passed": False, "results": [source, row | {"name": "mean"}]},
    )
    with pytest.raises(demo_command.typer.Exit):
        demo_command.demo(Path("out"))
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("Loss in nats per token over 40,000 held-out tokens")
    assert [line.split() for line in shown if " kB" in line] == [
        ["source", "12", "7.7", "kB", "2.250"],
        ["mean", "3", "1.9", "kB", "4.500", "no"],
    ]
    assert shown[-2:] == [
        "results  out",
        "next     gqa-convert convert YOUR-MODEL --kv-heads 8 --dry-run",
    ]
