"""What a conversion does where no method is named: the text it measures on, and when it falls
back to mean pooling.
"""

import json
import shutil
from pathlib import Path

import pytest

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion import planning
from gqa_convert.conversion.options import CalibrationOptions, ConversionOptions
from gqa_convert.conversion.planning import BUILT_IN_TOKENS, plan_conversion, why_no_text
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.data import sources
from gqa_convert.data.folders import source_files
from gqa_convert.demo import CHECKPOINT
from gqa_convert.verify import verify_checkpoint
from tests.helpers.checkpoints import same_weights, write_llama
from tests.helpers.command_line import run
from tests.helpers.verification import edit_json

GROUPS = 3


def test_the_default_measures_on_the_built_in_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert BUILT_IN_TOKENS >= 4096
    monkeypatch.setattr(planning, "BUILT_IN_TOKENS", 512)
    monkeypatch.setattr(
        sources, "source_files", lambda held_out: source_files(held_out=held_out)[::20]
    )
    result = convert_checkpoint(CHECKPOINT, tmp_path / "default", GROUPS)
    assert result.plan.method == "factor"
    assert result.calibration is not None
    assert result.calibration.tokens == 512
    assert "python-stdlib" in result.calibration.text
    options = ConversionOptions(
        method="factor", calibration=CalibrationOptions("python-stdlib", tokens=512)
    )
    convert_checkpoint(CHECKPOINT, tmp_path / "stated", GROUPS, options)
    assert same_weights(tmp_path / "default", tmp_path / "stated")
    named = convert_checkpoint(
        CHECKPOINT, tmp_path / "weights", GROUPS, ConversionOptions(method="factor")
    )
    assert named.calibration is None
    assert not same_weights(tmp_path / "default", tmp_path / "weights")
    assert verify_checkpoint(tmp_path / "default", CHECKPOINT).passed


@pytest.mark.parametrize(
    ("tokenizer", "reason"), [(None, "it has no tokenizer"), ("{}", "its tokenizer.json cannot")]
)
def test_without_a_tokenizer_heads_are_averaged_and_the_user_learns_why(
    tmp_path: Path, tokenizer: str | None, reason: str
) -> None:
    source = write_llama(tmp_path / "source")
    (source / "tokenizer.json").unlink()
    if tokenizer:
        (source / "tokenizer.json").write_text(tokenizer)
    result = run("convert", source, tmp_path / "out", "--kv-heads", str(GROUPS), "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["method"] == "mean"
    assert any(reason in warning for warning in found["warnings"])
    plan, calibration = plan_conversion(
        open_checkpoint(source),
        GROUPS,
        ConversionOptions(calibration=CalibrationOptions(device="cpu")),
    )
    assert (plan.method, calibration.device) == ("mean", None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {
                "model_type": "whisper",
                "architectures": ["WhisperForConditionalGeneration"],
                "is_encoder_decoder": True,
            },
            "its encoder reads audio",
        ),
        ({}, None),
    ],
)
def test_what_cannot_be_run_on_text(
    tmp_path: Path, changes: dict[str, object], reason: str | None
) -> None:
    source = Path(shutil.copytree(CHECKPOINT, tmp_path / "source"))
    edit_json(source / "config.json", **changes)
    assert why_no_text(open_checkpoint(source)) == reason
