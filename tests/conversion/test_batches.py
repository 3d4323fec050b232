"""What a source runs on: ready batches for models that hear or see, and how far calibration text is stretched."""

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.fit.batches import divide_batches, prepare_calibration
from gqa_convert.conversion.fit.options import CalibrationOptions, check_calibration
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.plan import make_plan
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.demo import CHECKPOINT
from gqa_convert.errors import DataError, OptionError
from gqa_convert.families.loading import load_model
from tests.helpers import folding_cases as folded
from tests.helpers.verification import edit_json
from tests.helpers.wrappers import image_batches, make_wrapper


def ids(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 60, (1, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("context", [4096, 512])
def test_the_models_context_is_reached(context: int, tmp_path: Path) -> None:
    """Blocks are stretched where they are shorter than it."""
    source = Path(shutil.copytree(CHECKPOINT, tmp_path / "source"))
    edit_json(source / "config.json", max_position_embeddings=context)
    plan = make_plan(open_checkpoint(source), 3, method="fit")
    options = CalibrationOptions(__file__, 1024, sequence_length=512, kl_steps=1, mix=False)
    text = prepare_calibration(plan, options)
    assert ("every second one stretched to 4096 positions" in text.description) == (context > 512)
    farthest = max(int(batch["position_ids"].max()) if "position_ids" in batch else 511 for batch in text.batches)
    assert 512 <= farthest < context if context > 512 else farthest == 511


def test_ready_batches_are_divided() -> None:
    """No more are taken than are needed; with too few, the last ones are held out."""
    taken = []

    def endless() -> Iterator[dict[str, torch.Tensor]]:
        for number in itertools.count():
            taken.append(number)
            yield {"input_ids": ids(10, number), "pixels": torch.full((2, 3), float(number), dtype=torch.float16)}

    found = divide_batches(endless(), 45, held_out=15, fresh=3)
    parts = [found.batches, found.held_out, found.fresh]
    assert [[int(batch["pixels"][0, 0]) for batch in part] for part in parts] == [[0, 1, 2, 3, 4], [5, 6], [7, 8, 9]]
    assert taken == list(range(10))
    assert (found.tokens, found.sequence_length) == (50, 10)
    assert found.description == "5 ready batches of input_ids, pixels with 50 tokens"
    assert found.batches[0]["pixels"].dtype == torch.float32
    assert divide_batches(endless(), 45).digest == found.digest != divide_batches(endless(), 35).digest
    for count, held_out in ((1, 0), (2, 1), (8, 1), (20, 2)):
        few = divide_batches(itertools.islice(endless(), count), 1000, held_out=100, fresh=3)
        kept = count - held_out
        assert (len(few.batches), len(few.held_out), few.tokens) == (kept, held_out, 10 * kept)
    assert not divide_batches(itertools.islice(endless(), 8), 1000).held_out


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "no batch"),
        ([{"input_ids": [1, 2]}], "batch 0 holds input_ids as list: give tensors"),
        ([{"input_ids": ids(2), "attention_mask": torch.tensor([[0, 1]])}], "batch 0 is padded .attention_mask has z"),
        ([{"input_features": torch.zeros(1)}], "batch 0 holds input_features: give input_ids too"),
    ],
)
def test_batches_that_no_model_takes(batches: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        divide_batches(batches, 10)
    with pytest.raises(OptionError, match="take the place of text"):
        check_calibration("fit", CalibrationOptions("text.txt", batches=batches))
    with pytest.raises(OptionError, match="--calibration-tokens is 0"):
        check_calibration("fit", CalibrationOptions("text.txt", tokens=0))


def sounds(folder: Path) -> tuple[Path, list[dict[str, torch.Tensor]]]:
    case = folded.build("whisper")
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(14, 1, case.model.config.num_mel_bins, 40, generator=generator)
    batches = [{"input_features": each, "decoder_input_ids": ids(20, n)} for n, each in enumerate(features)]
    return case.save(folder), batches


@pytest.mark.usefixtures("modeling_files_registered")
@pytest.mark.parametrize("kind", ["whisper", "llava", "qwen2_vl", "mllama"])
def test_models_that_hear_or_see_are_fitted(kind: str, tmp_path: Path) -> None:
    """Qwen2-VL's images have no row for each sequence; what mllama sees, text alone cannot show it."""
    if kind == "whisper":
        source, batches = sounds(tmp_path / "source")
    else:
        source, batches = make_wrapper(kind, tmp_path / "source"), image_batches(kind, 14)
    learned = [*batches[:8], *batches[-1:] * 6]  # random weights have learned nothing that other batches would share
    options = CalibrationOptions(batches=learned, tokens=160, steps=4, kl_steps=8, device="cpu")
    result = convert_checkpoint(source, tmp_path / "out", 3, ConversionOptions(calibration=options))
    assert result.plan.method == "fit"
    assert result.calibration is not None
    assert result.calibration.kl is not None
    assert result.calibration.kl.after < result.calibration.kl.before
    mean = convert_checkpoint(source, tmp_path / "mean", 3, ConversionOptions(method="mean"))
    models = [load_model(folder, torch.float32)[0] for folder in (source, tmp_path / "out", mean.out)]
    with torch.no_grad():
        logits = [model(**batches[-1]).logits.double().log_softmax(-1) for model in models]
    expected, fitted, pooled = logits
    divergences = [float((expected.exp() * (expected - each)).sum()) for each in (fitted, pooled)]
    assert divergences[0] < divergences[1]
