"""What decides, and what only measures: validation among whole blocks, and a divergence on text
that decided nothing.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gqa_convert.conversion import fitting
from gqa_convert.conversion.calibration import text as calibration_text
from gqa_convert.conversion.calibration.streams import Calibration, hold_out
from gqa_convert.conversion.layers import last_stage
from gqa_convert.conversion.options import CalibrationOptions, ConversionOptions
from gqa_convert.conversion.run import ConversionResult, convert_checkpoint
from gqa_convert.families.loading import load_model
from tests.helpers import folding_cases as folded
from tests.helpers.checkpoints import digests
from tests.helpers.command_line import run as command
from tests.helpers.fitting import divergence
from tests.helpers.tiny import VOCAB

STATED = {"tokens": 8, "sequence_length": 8, "steps": 2, "device": "cpu"}


def text(rows: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(3, VOCAB, (rows, length), generator=generator)}


def shapes(batches: Any) -> list[tuple[int, ...]]:
    return [tuple(batch["input_ids"].shape) for batch in batches]


@pytest.mark.parametrize(
    ("sizes", "share", "left", "held_out"),
    [
        ([(2, 1024)] * 12, 8, [(2, 1024)] * 11, [(2, 1024)]),
        ([(2, 1024)] * 11 + [(1, 2)], 8, [(2, 1024)] * 10 + [(1, 2)], [(2, 1024)]),
        ([(2, 1024)] * 16, 8, [(2, 1024)] * 14, [(2, 1024)] * 2),
        ([(8, 256)], 8, [(7, 256)], [(1, 256)]),
        ([(2, 1024), (1, 1000)], 8, [(2, 1024)], [(1, 1000)]),
        ([(1, 1024), (1, 300)], 8, [(1, 1024), (1, 300)], []),
        ([(1, 64)], 8, [(1, 64)], []),
        ([(32, 64)] * 2, 5, [(32, 64), (20, 64)], [(12, 64)]),
    ],
)
def test_whole_blocks_are_held_out_by_tokens(
    sizes: list[tuple[int, int]],
    share: int,
    left: list[tuple[int, int]],
    held_out: list[tuple[int, int]],
) -> None:
    batches = [text(rows, length, number) for number, (rows, length) in enumerate(sizes)]
    found = hold_out(batches, share)
    assert (shapes(found[0]), shapes(found[1])) == (left, held_out)
    kept = sorted(row.tolist() for part in found for batch in part for row in batch["input_ids"])
    assert kept == sorted(row.tolist() for batch in batches for row in batch["input_ids"])


def converted(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, held_out: Any, **stated: Any
) -> ConversionResult:
    """A conversion on random tokens."""
    learned = [text(4, 40, seed) for seed in range(3)]
    made = Calibration(
        learned, 480, "", "text", held_out=held_out, label="text.txt", fresh=[text(4, 40, 9)]
    )
    monkeypatch.setattr(fitting, "prepare_calibration", lambda *_: made)
    options = CalibrationOptions("python-stdlib", **STATED | stated)
    return convert_checkpoint(source, out, 3, ConversionOptions(method="fit", calibration=options))


def test_the_divergence_is_that_of_the_published_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the definition, of both checkpoints as they lie on the disk, in float32."""
    monkeypatch.setattr(last_stage, "RATE", 2e-2)
    case = folded.build("llama")
    source = (
        case.model.to(torch.bfloat16).save_pretrained(tmp_path / "source") or tmp_path / "source"
    )
    held_out = [text(2, 40, 7), text(1, 40, 8)]
    for name, steps in (("layers", 0), ("whole", 25)):
        result = converted(source, tmp_path / name, monkeypatch, held_out, kl_steps=steps)
        assert result.calibration is not None
        kl = result.calibration.kl
        assert kl is not None
        models = [load_model(folder, torch.float32)[0] for folder in (source, tmp_path / name)]
        assert kl.after == pytest.approx(divergence(*models, held_out), rel=1e-5)
        assert kl.text == "120 held-out tokens of text.txt"
        assert (kl.after == kl.before) is (steps == 0)
    assert digests(tmp_path / "layers") != digests(tmp_path / "whole")


@pytest.mark.parametrize("kl_steps", [0, 25])
def test_text_that_is_held_out_decides_nothing(
    kl_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a strength nor whether the last stage is worth its time or helped; nor is anything
    trained on it.
    """
    case = folded.build("llama")
    source = case.save(tmp_path / "source")
    monkeypatch.setattr(last_stage, "RATE", 2e-2)
    judged: list[Any] = []
    judge = last_stage.Student.divergence

    def noted(student: Any, batches: Any) -> float:
        judged.extend(batches)
        return judge(student, batches)

    monkeypatch.setattr(last_stage.Student, "divergence", noted)
    measured = set()
    for name, held_out in (
        ("one", text(1, 40, 5)),
        ("other", {"input_ids": torch.full((1, 40), 7)}),
    ):
        result = converted(source, tmp_path / name, monkeypatch, [held_out], kl_steps=kl_steps)
        assert result.calibration is not None
        assert result.calibration.kl is not None
        measured.add(result.calibration.kl.after)
        assert (result.calibration.kl.after == result.calibration.kl.before) is (kl_steps == 0)
        assert not any(torch.equal(batch["input_ids"], held_out["input_ids"]) for batch in judged)
    assert len(measured) == 2
    weights = [digests(tmp_path / name)["model.safetensors"] for name in ("one", "other")]
    assert weights[0] == weights[1]


def test_where_nothing_is_left_to_hold_out_no_figure_is_given(small: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(Path(calibration_text.__file__).read_text()[:3000])
    options = [
        "-c",
        tmp_path / "text.txt",
        "--no-mix",
        "--fit-steps",
        "1",
        "--calibration-length",
        "64",
    ]
    shown = command("convert", small, tmp_path / "out", "-n", "1", *options)
    assert shown.returncode == 0, shown.stderr
    assert "KL divergence" not in shown.stdout
    assert re.search(
        (
            "left out: the last stage.*; and the divergence from the source, because the layers "
            "use all of the text"
        ),
        shown.stderr,
    )
