"""The printed form of a plan."""

from pathlib import Path

import pytest

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.cli.console.plan import show_plan
from gqa_convert.conversion.plan import make_plan
from tests.helpers.own_files import make_source


@pytest.mark.parametrize(
    ("model_type", "changes", "contexts"),
    [
        ("bart", {"max_position_embeddings": 64}, [64, 32_768]),
        ("t5", {}, [32_768]),
        ("whisper", {"max_source_positions": 20}, [20]),
    ],
)
def test_the_cross_attention_cache_at_the_encoders_context(
    model_type: str,
    changes: dict[str, int],
    contexts: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    source = make_source(model_type, tmp_path / "source", **changes)
    plan = make_plan(open_checkpoint(source), 3, method="mean")
    show_plan(plan)
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    rows = [line for line in shown if line.startswith("cross cache at ")]
    assert [line.partition(" encoder tokens ")[0] for line in rows] == [f"cross cache at {n:,}" for n in contexts]
    before = plan.cache_bytes_per_token(False, "cross") * contexts[0]
    unit, name = (1e6, "MB") if before >= 1e6 else (1e3, "kB")
    assert f"{before / unit:,.1f} {name} {before / 4 / unit:,.1f} {name} 0.250" in rows[0]
