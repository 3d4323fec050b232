"""How much text a source runs on, and how far it is stretched."""

import shutil
from pathlib import Path

import pytest

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.calibration.batches import prepare_calibration
from gqa_convert.conversion.options import CalibrationOptions
from gqa_convert.conversion.plan import make_plan
from gqa_convert.conversion.planning import check_calibration
from gqa_convert.demo import CHECKPOINT
from gqa_convert.errors import OptionError
from tests.helpers.verification import edit_json


@pytest.mark.parametrize("context", [4096, 512])
def test_the_models_context_is_reached(context: int, tmp_path: Path) -> None:
    """Blocks are stretched where they are shorter than it."""
    source = Path(shutil.copytree(CHECKPOINT, tmp_path / "source"))
    edit_json(source / "config.json", max_position_embeddings=context)
    plan = make_plan(open_checkpoint(source), 3, method="fit")
    options = CalibrationOptions(shutil.__file__, 1024, sequence_length=512, kl_steps=1, mix=False)
    text = prepare_calibration(plan, options)
    assert ("every second one stretched to 4096 positions" in text.description) == (context > 512)
    farthest = max(
        int(batch["position_ids"].max()) if "position_ids" in batch else 511
        for batch in text.batches
    )
    assert 512 <= farthest < context if context > 512 else farthest == 511


def test_no_tokens_are_refused() -> None:
    with pytest.raises(OptionError, match="--calibration-tokens is 0"):
        check_calibration("fit", CalibrationOptions("text.txt", tokens=0))
