"""Reads what the user named: OUT, SOURCE and the text. A mistake in one of them is an error, not a failed check."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gqa_convert.checkpoint.paths import local_path
from gqa_convert.checkpoint.quantised import quantisation_method
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.rewriting.folder import rewritten_folder
from gqa_convert.conversion.rewriting.planning import needs_rewriting, plan_rewriting
from gqa_convert.errors import ConfigError, CorruptCheckpointError, GQAConvertError, OptionError, SourceNotFoundError
from gqa_convert.families.family import Family
from gqa_convert.families.records import with_key_norm
from gqa_convert.families.table import RESTATED, family_of
from gqa_convert.families.wrappers import decoder_config
from gqa_convert.verify.report import first_line
from gqa_convert.verify.weights import CONFIG, Weights, read_object

Progress = Callable[[str, int, int], None]
"""Called with a stage (tensors, logits or text), the amount done and the total: bytes, steps or tokens."""
_TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


@dataclass(frozen=True)
class Inputs:
    """The two checkpoints of a verification."""

    out: Path
    out_config: dict[str, Any]
    """Empty if it cannot be read, which the check on the config reports."""
    source: Weights
    """SOURCE's tensors, in the form in which it was converted."""
    config: dict[str, Any]
    """SOURCE's config in that form."""
    family: Family
    original: Weights
    """The tensors of SOURCE as the user named it: `source`, unless it is rewritten before it is converted."""
    original_config: dict[str, Any]
    text: str | None
    """The text to measure both losses on."""

    @property
    def is_rewritten(self) -> bool:
        """Whether SOURCE is rewritten before it is converted."""
        return self.original is not self.source

    @property
    def decoder_config(self) -> dict[str, Any]:
        """The config of SOURCE's decoder, which in a composite model is nested in `config`."""
        return decoder_config(self.config)

    @property
    def has_class(self) -> bool:
        """Whether transformers has a class for the type. Some types exist only as code in checkpoints."""
        return self.family.native or self.family.modeling is not None

    @property
    def why_not_loaded(self) -> str:
        """Why SOURCE as the user named it cannot be loaded; empty if it can."""
        if quantisation_method(self.original_config) is not None:
            return "the weights of SOURCE are quantised"
        model_type = self.original_config.get("model_type")
        if model_type in RESTATED:
            return f"transformers has no class of type {model_type}, and code in checkpoints is never executed"
        return ""


@contextmanager
def read_inputs(
    out: str | Path, source: str | Path, revision: str | None, text: Path | None, on_note: Callable[[str], None]
) -> Iterator[Inputs]:
    """Open both checkpoints and read the text. Remote checkpoints are downloaded. A SOURCE that a conversion to OUT
    rewrites first is rewritten in a folder beside OUT, which goes at the end of the context.

    Args:
        out: the converted folder.
        source: the folder or the Hub id that it was made from.
        revision: branch, tag or commit on the Hub.
        text: a file, or None.
        on_note: called with sentences on what is rewritten.

    Raises:
        SourceNotFoundError: `out` is not a folder, or `source` holds no checkpoint.
        ConfigError: SOURCE's config is damaged.
        CorruptCheckpointError: SOURCE's weights cannot be opened.
        UnsupportedFamilyError: SOURCE's model type cannot be converted.
        OptionError: the text cannot be read or scored, or SOURCE cannot be rewritten as OUT's type.
    """
    out = local_path(out)
    if not out.is_dir():
        raise SourceNotFoundError(f"{out} is not a folder: name the converted checkpoint")
    content = None if text is None else _read_text(local_path(text))
    folder = _source_folder(source, revision)
    config = _read_config(folder)
    out_config = _readable_config(out)
    if not needs_rewriting(config, out_config.get("model_type")):
        family = family_of(config)
        weights = Weights(folder, _source_error)
        if not family.listed:
            family = with_key_norm(family, weights.shapes, config["num_key_value_heads"])
        inputs = Inputs(out, out_config, weights, config, family, weights, config, content)
        _check_text(inputs)
        yield inputs
        return
    planned = plan_rewriting(open_checkpoint(folder, quantised=True), native=True)
    for note in planned.rewriting_notes:
        on_note(note)
    with rewritten_folder(planned, out) as rewritten:
        assert rewritten.folder is not None
        dtypes = {name: _TORCH[dtype] for name, dtype in rewritten.result_dtypes.items()}
        weights, original = Weights(rewritten.folder, _source_error, dtypes), Weights(folder, _source_error)
        family = family_of(rewritten.config)
        inputs = Inputs(out, out_config, weights, rewritten.config, family, original, config, content)
        _check_text(inputs)
        yield inputs


def _source_error(problem: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{problem}: download or copy the source again")


def _readable_config(out: Path) -> dict[str, Any]:
    try:
        return read_object(out / CONFIG)
    except (OSError, ValueError):
        return {}


def _source_folder(source: str | Path, revision: str | None) -> Path:
    path = local_path(source)
    if path.is_dir():
        if revision is not None:
            raise SourceNotFoundError(
                f"{source} is a local folder, which has no revision {revision!r}: leave --revision out"
            )
        return path
    folder = open_checkpoint(source, revision=revision, download=True, quantised=True).folder
    assert folder is not None
    return folder


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise SourceNotFoundError(f"{folder} has no {CONFIG}: name the folder that OUT was made from")
    try:
        return read_object(path)
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{path} cannot be read ({first_line(problem)}): download or copy it again") from None


def _check_text(inputs: Inputs) -> None:
    if inputs.text is None:
        return
    from gqa_convert.families.loading import TASKS, auto_class, check_language_model

    if not inputs.has_class or auto_class(inputs.config) not in (TASKS[0], TASKS[3]):
        raise OptionError(
            "--text measures the loss of a causal language model in transformers, which "
            f"{inputs.family.model_type} is not: leave the text out"
        )
    check_language_model("SOURCE", inputs.config, "--text measures the loss of one; leave the text out")


def _read_text(path: Path) -> str:
    from gqa_convert.text.scoring.text_to_score import read_file

    try:
        return read_file(path)
    except GQAConvertError as problem:
        raise OptionError(str(problem)) from None
