"""What a conversion does where the user names neither a method nor calibration text.

Measured on a pretrained model with wide heads (docs/results/README.md), `factor` from the weights alone loses more than
mean pooling, and `factor` on a few thousand tokens of any real text far less. So the default measures on text that
every machine has, and falls back to mean pooling where the source cannot read text.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.conversion.fit.options import CalibrationOptions, check_calibration, check_predicts
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.plan import Plan, make_plan
from gqa_convert.errors import NoLanguageModelError
from gqa_convert.families.loading import check_language_model
from gqa_convert.families.table import family_of
from gqa_convert.merging.methods import CALIBRATED_DEFAULT, DEFAULT, MEAN, REPEAT

BUILT_IN_TOKENS: Final = 4096
"""Tokens of the built-in text. More text gains little without `fit`, and large models pay for every token."""
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)


def plan_conversion(
    checkpoint: Checkpoint,
    groups: int | Sequence[int],
    options: ConversionOptions,
) -> tuple[Plan, CalibrationOptions]:
    """The plan of a conversion, and its calibration.

    Args:
        checkpoint: the source.
        groups: K/V heads per layer in the result, or those of each layer.
        options: as the user gave them. No method means `fit` with calibration data; without it, `factor` on the
            built-in text, or `mean` with a warning where `why_no_text` gives a reason.

    Raises:
        GQAConvertError: as `make_plan`, `check_calibration` and `check_predicts`.
    """
    method, calibration = options.method, options.calibration
    reason = None
    if method is None:
        method = (CALIBRATED_DEFAULT if calibration.has_data else DEFAULT).name
        if calibration == CalibrationOptions(
            seed=calibration.seed, device=calibration.device, mix=calibration.mix
        ):
            reason = why_no_text(checkpoint)
            if reason:
                method = MEAN.name
                calibration = replace(calibration, device=None)  # nothing runs on it
            else:
                from gqa_convert.data.sources import STDLIB  # imports numpy

                calibration = replace(calibration, source=STDLIB, tokens=BUILT_IN_TOKENS)
    plan = make_plan(
        checkpoint,
        groups,
        method=method,
        seed=calibration.seed,
        encoder=options.encoder,
        native=options.native,
    )
    exact = []
    if plan.merge_method is REPEAT:
        exact.append(
            "N is above the source's number of K/V heads: heads are repeated, and the cache grows"
        )
    if plan.merge_method.is_exact and options.calibration.has_data:
        exact.append("no heads are merged, so that --calibration is not used")
    plan = replace(plan, warnings=(*plan.warnings, *exact))
    check_calibration(plan.method, calibration)
    check_predicts(plan, calibration)
    if reason and plan.merge_method.name == MEAN.name:
        warning = f"heads are averaged by default, because {reason}: --method factor merges by weights alone"
        plan = replace(plan, warnings=(*plan.warnings, warning))
    return plan, calibration


def why_no_text(checkpoint: Checkpoint) -> str | None:
    """Why the source cannot be run on text, as far as its config and its files say; None if it can.

    Args:
        checkpoint: the source. Of a checkpoint on the Hub only the config and the names of files are looked at.
    """
    family = family_of(checkpoint.config)
    if not family.native and family.modeling is None:
        return f"transformers has no class of type {family.model_type}"
    if family.reads_images_alone:
        return "its cross-attention reads images alone"
    if isinstance(
        checkpoint.config.get("max_source_positions"), int
    ):  # as many frames for every sound
        return "its encoder reads audio"
    files = [name for name in _TOKENIZER_FILES if name in checkpoint.sizes]
    if not files:
        return "it has no tokenizer"
    file, folder = files[0], checkpoint.folder
    if file == _TOKENIZER_FILES[0] and folder is not None and not _is_tokenizer(folder / file):
        return f"its {file} cannot be read"
    try:
        check_language_model(checkpoint.source_id, checkpoint.config, "")
    except NoLanguageModelError:
        return "it has no language-model head"
    return None


def _is_tokenizer(file: Path) -> bool:
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(file))
    except Exception:  # tokenizers raises no narrower type
        return False
    return True
