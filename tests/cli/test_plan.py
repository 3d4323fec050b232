"""The caches of encoder-decoders in a plan, and its table of changes."""

from pathlib import Path

import pytest

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.cli.console.plan import caches_at_context, show_plan
from gqa_convert.conversion.fit.memory import estimate_needs
from gqa_convert.conversion.fit.options import CalibrationOptions
from gqa_convert.conversion.plan import make_plan
from tests.helpers.own_files import make_source


@pytest.mark.parametrize(
    ("model_type", "changes", "context", "label"),
    [
        ("bart", {"max_position_embeddings": 64}, 64, "64"),
        ("t5", {}, 32_768, "32.8k"),
        ("whisper", {"max_source_positions": 20}, 20, "20"),
    ],
)
def test_the_cross_attention_cache_at_the_encoders_context(
    model_type: str,
    changes: dict[str, int],
    context: int,
    label: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    source = make_source(model_type, tmp_path / "source", **changes)
    plan = make_plan(open_checkpoint(source), 3, method="mean")
    caches = caches_at_context(plan, None, 2)
    show_plan(plan, estimate_needs(plan, CalibrationOptions()), caches)
    before = 2 * plan.kv_cache_bytes("cross").before * context
    assert caches["cross_kv_cache"] == {"tokens": context, "batch": 2, "before": before, "after": before // 4}
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    (row,) = [line for line in shown if line.startswith("cross cache at ")]
    assert row.startswith(f"cross cache at {label} tokens, batch 2 ")
    unit, name = (1e6, "MB") if before >= 1e6 else (1e3, "kB")
    assert row.endswith(f"{before / unit:,.1f} {name} {before / 4 / unit:,.1f} {name} 0.250")


def test_layers_of_an_encoder_and_of_a_decoder_share_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_source("t5", tmp_path / "source")
    plan = make_plan(open_checkpoint(source), 3, method="mean", encoder=True)
    show_plan(plan, estimate_needs(plan, CalibrationOptions()), {})
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if "k.weight" in line]
    assert rows == [["0-2", "layer.0.SelfAttention.k.weight"], ["0-1", "layer.1.EncDecAttention.k.weight"]]
