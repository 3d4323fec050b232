"""Reads what the user named: OUT, SOURCE and the text. A mistake in one of them is an error, not a failed check."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.paths import local_path
from gqa_convert.errors import ConfigError, CorruptCheckpointError, GQAConvertError, OptionError, SourceNotFoundError
from gqa_convert.families.family import Family
from gqa_convert.families.table import family_of
from gqa_convert.families.wrappers import decoder_config
from gqa_convert.verify.checkpoint_reader import CONFIG, Weights, first_line, read_object

Progress = Callable[[str, int, int], None]
"""Called with a stage (tensors, logits or text), the amount done and the total: bytes, forward passes or tokens."""


@dataclass(frozen=True)
class Inputs:
    """The two checkpoints of a verification."""

    out: Path
    source: Path
    """The local folder of SOURCE."""
    config: dict[str, Any]
    """SOURCE's config.json."""
    family: Family
    """SOURCE's family."""
    weights: Weights
    """SOURCE's tensors."""
    text: str | None
    """The text to measure both losses on."""

    @property
    def decoder_config(self) -> dict[str, Any]:
        """The config of SOURCE's decoder, which in a wrapper is nested in `config`."""
        return decoder_config(self.config)

    @property
    def runs(self) -> bool:
        """Whether transformers has a class for SOURCE's model type. Some types exist only as code in checkpoints."""
        return _has_class(self.family)


def read_inputs(
    out: str | Path,
    source: str | Path,
    *,
    revision: str | None,
    text: Path | None,
) -> Inputs:
    """Open both checkpoints and read the text. Remote checkpoints are downloaded.

    Args:
        out: the converted folder.
        source: the folder or the Hub id that it was made from.
        revision: branch, tag or commit on the Hub.
        text: a file, or None.

    Raises:
        SourceNotFoundError: `out` is not a folder, or `source` holds no checkpoint.
        ConfigError: SOURCE's config is damaged.
        CorruptCheckpointError: SOURCE's weights cannot be opened.
        UnsupportedFamilyError: SOURCE's model type cannot be converted.
        OptionError: the text cannot be read or scored.
    """
    out = local_path(out)
    if not out.is_dir():
        raise SourceNotFoundError(f"{out} is not a folder: name the converted checkpoint")
    content = None if text is None else _read_text(local_path(text))
    folder = _source_folder(source, revision)
    config = _read_config(folder)
    family = family_of(config)
    if text is not None:
        _check_scores_text(family, config)
    weights = Weights(folder, lambda problem: CorruptCheckpointError(f"{problem}: download or copy the source again"))
    return Inputs(out, folder, config, family, weights, content)


def _source_folder(source: str | Path, revision: str | None) -> Path:
    path = local_path(source)
    if path.is_dir():
        if revision is not None:
            raise SourceNotFoundError(
                f"{source} is a local folder, which has no revision {revision!r}: leave --revision out"
            )
        return path
    from gqa_convert.checkpoint.source import open_checkpoint

    folder = open_checkpoint(source, revision=revision, download=True).folder
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


def _has_class(family: Family) -> bool:
    return family.native or family.modeling is not None


def _check_scores_text(family: Family, config: dict[str, Any]) -> None:
    from gqa_convert.families.loading import TASKS, auto_class, check_language_model

    if not _has_class(family) or auto_class(config) not in (TASKS[0], TASKS[3]):
        raise OptionError(
            f"--text measures the loss of a causal language model in transformers, which {family.model_type} is not: "
            "leave the text out"
        )
    check_language_model("SOURCE", config, "--text measures the loss of one; leave the text out")


def _read_text(path: Path) -> str:
    from gqa_convert.text.scoring.text_to_score import read_file

    try:
        return read_file(path)
    except GQAConvertError as problem:
        raise OptionError(str(problem)) from None
