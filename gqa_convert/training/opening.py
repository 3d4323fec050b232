"""Opens the models that a recipe names, before anything large is loaded."""

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gqa_convert.checkpoint.paths import local_path
from gqa_convert.checkpoint.source import Checkpoint, open_checkpoint
from gqa_convert.data.decoder_start import decoder_start, starts_with_last
from gqa_convert.data.objectives import SampleSettings
from gqa_convert.errors import MissingExtraError, SourceNotFoundError
from gqa_convert.families import loading
from gqa_convert.training.choosing import choose_objective, sample_length
from gqa_convert.training.recipe import Recipe
from gqa_convert.training.recipe_files import conversion_command

NEEDS_HEAD = "uptraining trains the predictions of one; name the language model that the checkpoint was made from"
"""Advice for a checkpoint that was saved without its language-model head."""


@dataclass(frozen=True)
class Opened:
    """The facts about a run that are known before its models are loaded."""

    student: Checkpoint
    student_folder: Path
    settings: SampleSettings
    """Those of the run's samples."""
    teacher_folder: Path | None
    source_folder: Path | None
    """The checkpoint that the student was converted from, if it is on this machine."""


def open_recipe(recipe: Recipe) -> Opened:
    """Read the configs and tokenizers of a recipe's models.

    Raises:
        RecipeError: objective, sequence length or teacher don't suit the model.
        GQAConvertError: a checkpoint can't be used.
    """
    student = open_checkpoint(recipe.model, download=True)
    folder, teacher_folder = student.folder, None
    assert folder is not None
    loading.check_language_model(recipe.model, student.config, NEEDS_HEAD)
    settings = sample_settings(recipe, student)
    if recipe.teacher is not None:
        from gqa_convert.training.teacher import check_vocabularies

        teacher = open_checkpoint(recipe.teacher, download=True)
        loading.check_language_model(recipe.teacher, teacher.config, NEEDS_HEAD)
        teacher_folder = teacher.folder
        assert teacher_folder is not None
        with loading.explained(f"the tokenizer of {recipe.teacher}"):
            check_vocabularies(folder, teacher_folder)
    return Opened(student, folder, settings, teacher_folder, teacher_folder or _source_of(folder))


def sample_settings(recipe: Recipe, student: Checkpoint) -> SampleSettings:
    """The settings of a run's samples, from the config and the tokenizer of its model alone.

    Raises:
        RecipeError: objective or sequence length don't suit the model.
    """
    config, folder = student.config, student.folder
    assert folder is not None
    with loading.explained(f"the tokenizer of {recipe.model}"):
        tokenizer = loading.load_tokenizer(folder)
    return SampleSettings(
        tokenizer,
        choose_objective(recipe, config, tokenizer),
        sample_length(recipe, config),
        decoder_start(folder, config, tokenizer) if loading.is_encoder_decoder(config) else None,
        starts_with_last(config),
        folder,
    )


def _source_of(student: Path) -> Path | None:
    """The source that the student's provenance names, if it is a folder on this machine."""
    try:
        folder = Path(json.loads((student / "gqa_conversion.json").read_bytes())["source"]["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return folder if (folder / "config.json").is_file() else None


def check_trackers(recipe: Recipe) -> None:
    """Refuse trackers that are not installed, which accelerate would omit silently.

    Raises:
        MissingExtraError: a tracker is not installed.
    """
    for tracker in recipe.trackers:
        packages = ("tensorboard", "tensorboardX") if tracker == "tensorboard" else (tracker,)
        if not any(importlib.util.find_spec(package) for package in packages):
            raise MissingExtraError(
                f"trackers names {tracker}, which is not installed: pip install {tracker}, or remove it from trackers"
            )


@contextmanager
def naming_conversion(path: str | Path, model: str) -> Iterator[None]:
    """Name the command that makes a missing converted model, if the recipe's comments have it."""
    try:
        yield
    except SourceNotFoundError:
        command = None if local_path(model).exists() else conversion_command(path, model)
        if command is None:
            raise
        raise SourceNotFoundError(f"the converted model {model} does not exist: make it with {command}") from None
