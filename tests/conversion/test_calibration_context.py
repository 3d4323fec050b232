"""How far calibration text is stretched, from the config and from `--calibration-context`."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.fit.batches import prepare_calibration
from gqa_convert.conversion.fit.options import CalibrationOptions, check_calibration
from gqa_convert.conversion.plan import make_plan
from gqa_convert.demo import CHECKPOINT
from gqa_convert.errors import OptionError
from tests.helpers.command_line import run

CONTEXT, LENGTH = 4096, 512


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled checkpoint, as if it had more positions."""
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path_factory.mktemp("far") / "source"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return folder


def calibration(source: Path, **options: Any) -> Any:
    plan = make_plan(open_checkpoint(source), 3, method="fit")
    given = CalibrationOptions(__file__, 1024, sequence_length=LENGTH, kl_steps=1, **options)
    return prepare_calibration(plan, given)


def test_the_models_context_is_reached(far: Path) -> None:
    text = calibration(far)
    assert f"every second one stretched to {CONTEXT} positions" in text.description
    assert LENGTH <= max(int(batch["position_ids"].max()) for batch in text.batches) < CONTEXT


def test_an_option_says_how_far(far: Path) -> None:
    near, plain = calibration(far, context=700), calibration(far, context=LENGTH)
    assert max(int(batch["position_ids"].max()) for batch in near.batches) < 700
    assert "stretched" not in plain.description
    assert all(batch.keys() == {"input_ids"} for batch in plain.batches)
    assert len({near.digest, plain.digest, calibration(far).digest}) == 3


def test_a_context_of_one_block_leaves_nothing_to_stretch() -> None:
    assert "stretched" not in calibration(CHECKPOINT).description


@pytest.mark.parametrize(
    ("context", "changes", "message"),
    [
        (1, {}, "--calibration-context is 1, expected at least 2"),
        (9000, {}, f"--calibration-context is 9000, and the model has positions for {CONTEXT}: lower it"),
        (64, {"max_position_embeddings": None}, "needs rotary positions over a context that config.json states"),
    ],
)
def test_bad_contexts(far: Path, tmp_path: Path, context: int, changes: dict[str, Any], message: str) -> None:
    source = Path(shutil.copytree(far, tmp_path / "source"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(OptionError, match=message):
        calibration(source, context=context)


def test_it_needs_text() -> None:
    with pytest.raises(OptionError, match="--calibration-context 64 needs calibration text"):
        check_calibration("factor", CalibrationOptions(context=64))


def test_the_command_line_passes_it_on(far: Path, tmp_path: Path) -> None:
    done = run("convert", far, tmp_path / "out", "--groups", "3", "-c", __file__, "--calibration-context", "9000", "-q")
    assert done.returncode == 2
    assert "--calibration-context is 9000" in done.stderr
    assert not (tmp_path / "out").exists()
