"""From a source and what the user asks to a plan and the calibration that goes with it, or to a
refusal.

Where the user names neither a method nor calibration text: measured on a pretrained model with wide
heads (docs/results/README.md), `factor` from the weights alone loses more than mean pooling, and
`factor` on a few thousand tokens of any real text far less. So the default measures on text that
every machine has, and falls back to mean pooling where the source cannot read text.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.errors import OptionError
from gqa_convert.families.loading import hears, read_kind
from gqa_convert.families.table import Family, family_of
from gqa_convert.merging.methods import CALIBRATED_DEFAULT, DEFAULT, MEAN, METHODS, REPEAT
from gqa_convert.runtime.machine import chosen_device

from .options import CalibrationOptions, ConversionOptions, each_of
from .plan import Plan, make_plan
from .rewriting.source import plan_rewriting

BUILT_IN_TOKENS: Final = 4096
"""Tokens of the built-in text. More text gains little without `fit`, and large models pay for every
token.
"""
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)


def plan_conversion(
    source: Checkpoint, kv_heads: int | Sequence[int], options: ConversionOptions
) -> tuple[Plan, CalibrationOptions]:
    """The plan of a conversion, and its calibration.

    Args:
        source: the opened source; the plan has it in the form in which it is converted.
        kv_heads: K/V heads per layer in the result, or those of each layer.
        options: as the user gave them. No method means `fit` with calibration data; without it,
            `factor` on the built-in text, or `mean` with a warning where `why_no_text` gives a
            reason.

    Raises:
        GQAConvertError: as `plan_rewriting`, `make_plan`, `check_calibration` and `check_predicts`.
    """
    checkpoint = plan_rewriting(source, kv_heads, native=options.native)
    method, calibration, reason = options.method, options.calibration, None
    if method is None:
        method, calibration, reason = _default(checkpoint, calibration)
    plan = make_plan(checkpoint, kv_heads, method=method, native=options.native)
    check_calibration(plan.method, calibration, read_kind(plan.checkpoint.config))
    check_predicts(plan, calibration)
    notes = _notes(plan, reason, is_read=options.calibration.has_data)
    return replace(plan, warnings=(*plan.warnings, *notes)), calibration


def _default(
    checkpoint: Checkpoint, stated: CalibrationOptions
) -> tuple[str, CalibrationOptions, str | None]:
    """The method where none is named, its calibration, and why the source reads no text, if so."""
    if stated.has_data:
        return CALIBRATED_DEFAULT.name, stated, None
    if stated != CalibrationOptions(seed=stated.seed, device=stated.device, mix=stated.mix):
        return DEFAULT.name, stated, None  # which is refused: these options need text
    reason = why_no_text(checkpoint)
    if reason:
        return MEAN.name, replace(stated, device=None), reason  # nothing runs on a device
    from gqa_convert.data.sources import STDLIB  # imports numpy

    return DEFAULT.name, replace(stated, source=STDLIB, tokens=BUILT_IN_TOKENS), None


def _notes(plan: Plan, reason: str | None, *, is_read: bool) -> Iterator[str]:
    """What the user may not expect of the method that applies.

    Args:
        plan: of the conversion.
        reason: why the source reads no text, where that chose the method.
        is_read: whether the user has named text.
    """
    method = plan.merge_method
    if method is REPEAT:
        yield "N is above the source's number of K/V heads: heads are repeated, and the cache grows"
    if method.is_exact and is_read:
        yield "no heads are merged, so that --calibration is not used"
    if method is MEAN and reason:
        yield (
            f"heads are averaged by default, because {reason}: --method factor merges by weights "
            "alone"
        )


def why_no_text(checkpoint: Checkpoint) -> str | None:
    """Why the source cannot be run on text, as far as its config and its files say; None if it can.

    Args:
        checkpoint: the source. Of a checkpoint on the Hub only the config and the names of files
            are looked at.
    """
    if reason := _why_not_run(family_of(checkpoint.config)):
        return reason
    if hears(checkpoint.config):
        return "its encoder reads audio"
    files = [name for name in _TOKENIZER_FILES if name in checkpoint.sizes]
    if not files:
        return "it has no tokenizer"
    file, folder = files[0], checkpoint.folder
    if file == _TOKENIZER_FILES[0] and folder is not None and not _is_tokenizer(folder / file):
        return f"its {file} cannot be read"
    return None


def _is_tokenizer(file: Path) -> bool:
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(file))
    except Exception:  # tokenizers raises no narrower type
        return False
    return True


def check_calibration(method: str, options: CalibrationOptions, data: str = "text") -> None:
    """Refuse options that contradict each other.

    Args:
        method: a key of METHODS.
        options: as the user gave them.
        data: what the source reads, as `read_kind` names it.

    Raises:
        OptionError: `fit` without text, text for a method that reads none, an option of calibration
            without text, or a device that is not there.
    """
    wanted, able = METHODS[method], CALIBRATED_DEFAULT.name
    of_text = {
        "--calibration-tokens": options.tokens,
        "--calibration-length": options.sequence_length,
        "--device": options.device,
    }
    of_training = {
        "--fit-steps": options.steps,
        "--kl-steps": options.kl_steps,
        "--no-mix": None if options.mix else "",
    }
    given = _given(of_text) + _given(of_training)
    if wanted.text == "never" and options.has_data:
        given.insert(0, "--calibration")
    # options that need text, or a method that does
    if wanted.text == "never" and given:
        raise OptionError(
            f"{given[0]} is of no use to --method {method}: leave it out, or choose --method {able}"
        )
    files = "a text file or dataset" if data == "text" else "a folder of audio files"
    name_it = f"needs calibration {data}: name {files} with --calibration"
    if not options.has_data and wanted.text == "required":
        raise OptionError(f"--method {method} {name_it}, or choose --method {DEFAULT.name}")
    if not options.has_data and given:
        raise OptionError(f"{given[0]} {name_it}, or leave it out")
    # options of training, and numbers out of range
    for option in _given(of_training):
        if not wanted.trains:
            raise OptionError(f"{option} with --method {method}: only {able} takes it")
    for option in ("--fit-steps", "--kl-steps"):
        steps = of_training[option]
        if isinstance(steps, int) and steps < 0:
            raise OptionError(f"{option} is {steps}, expected 0 or more")
    if options.tokens is not None and options.tokens < 1:
        raise OptionError(f"--calibration-tokens is {options.tokens}, expected a number above 0")
    if options.device is not None:
        chosen_device(options.device)


def _given(options: Mapping[str, int | str | None]) -> list[str]:
    """The options that have a value, with it."""
    return [f"{option} {value}".strip() for option, value in options.items() if value is not None]


def check_predicts(plan: Plan, options: CalibrationOptions) -> None:
    """Refuse calibration of a source that transformers cannot run, and local text that is not
    there.

    Raises:
        DataError: there is no such file or folder.
        OptionError: transformers has no class for it, or it has cross-attention that only images
            run.
    """
    if not options.has_data:
        return
    if not hears(plan.checkpoint.config):
        from gqa_convert.data.sources import as_source, is_on_hub, is_self, open_source

        for text in each_of(options.source):
            if not is_self(text) and not is_on_hub(as_source(text)):
                open_source(as_source(text))
    if reason := _why_not_run(plan.family):
        raise OptionError(
            f"calibration runs the source, and {reason}: choose --method factor without "
            "--calibration"
        )


def _why_not_run(family: Family) -> str | None:
    """Why transformers cannot run a source on text or sound; None if it can."""
    if not family.native and family.modeling is None:
        return f"transformers has no class of type {family.model_type}"
    if family.reads_images_alone:
        return "its cross-attention runs on images alone"
    return None
