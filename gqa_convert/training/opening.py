"""Opens the models that a recipe names, before anything large is loaded."""

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.resource_errors import is_out_of_memory
from gqa_convert.checkpoint.source import Checkpoint, open_checkpoint
from gqa_convert.data.decoder_start import decoder_start, starts_with_last
from gqa_convert.errors import DeviceMemoryError, MissingExtraError
from gqa_convert.families import loading
from gqa_convert.training.documents import refuse_mixing
from gqa_convert.training.objectives import check_input, choose_objective, sample_length
from gqa_convert.training.recipe import Recipe

NEEDS_HEAD = "uptraining trains the predictions of one; name the language model that the checkpoint was made from"
"""Advice for a checkpoint that was saved without its language-model head."""
_PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX")}
"""The packages of trackers whose name differs from the tracker's; one of the packages suffices."""


@dataclass(frozen=True)
class Opened:
    """The facts about a run that are known before its models are loaded."""

    student: Checkpoint
    student_folder: Path
    tokenizer: Any
    teacher: Checkpoint | None
    teacher_folder: Path | None
    source_folder: Path | None
    """The checkpoint that the student was converted from, if it is on this machine."""
    objective: str
    sequence_length: int
    decoder_start: int | None
    """The first token of the decoder's input in an encoder-decoder."""
    starts_with_last: bool
    """Whether the decoder's input begins with the target's last token instead."""


def open_recipe(recipe: Recipe) -> Opened:
    """Read the configs and tokenizers of a recipe's models.

    Raises:
        RecipeError: objective, sequence length or teacher don't suit the model, or the model reads audio.
        GQAConvertError: a checkpoint can't be used.
    """
    student = open_checkpoint(recipe.model, download=True)
    assert student.folder is not None
    check_input(recipe.model, student.config)
    opened = None if recipe.teacher is None else open_checkpoint(recipe.teacher, download=True)
    teacher = None if opened is None else opened.folder
    for name, checkpoint in ((recipe.model, student), (str(recipe.teacher), opened)):
        if checkpoint is not None:
            loading.check_language_model(name, checkpoint.config, NEEDS_HEAD)
    with explained(recipe.model, "the tokenizer of"):
        tokenizer = loading.load_tokenizer(student.folder)
    if teacher is not None:
        from gqa_convert.training.teacher import shared_vocabulary

        with explained(str(recipe.teacher), "the tokenizer of"):
            shared_vocabulary(student.folder, teacher)
    objective, length = choose_objective(recipe, student.config, tokenizer), sample_length(recipe, student.config)
    if recipe.document_mask:
        refuse_mixing(recipe.model, student.config, length)
        if opened is not None:
            refuse_mixing(str(recipe.teacher), opened.config, length)
    start = (
        decoder_start(student.folder, student.config, tokenizer) if loading.is_encoder_decoder(student.config) else None
    )
    return Opened(
        student,
        student.folder,
        tokenizer,
        opened,
        teacher,
        teacher or _source_of(student.folder),
        objective,
        length,
        start,
        starts_with_last(student.config),
    )


def source_folder(recipe: Recipe) -> Path | None:
    """The checkpoint that a recipe's model was converted from: its teacher, or the folder that the model's provenance
    names; None if that is not on this machine.
    """
    if recipe.teacher is not None:
        return open_checkpoint(recipe.teacher, download=True).folder
    folder = open_checkpoint(recipe.model, download=True).folder
    return None if folder is None else _source_of(folder)


def _source_of(student: Path) -> Path | None:
    """The source that the student's provenance names, if it is a folder on this machine."""
    try:
        stated = json.loads((student / "gqa_conversion.json").read_bytes())["source"]["id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    folder = Path(str(stated))
    return folder if (folder / "config.json").is_file() else None


def check_trackers(recipe: Recipe) -> None:
    """Refuse trackers that are not installed, which accelerate would omit silently.

    Raises:
        MissingExtraError: a tracker is not installed.
    """
    for tracker in recipe.trackers:
        packages = _PACKAGES.get(tracker, (tracker,))
        if not any(importlib.util.find_spec(package) for package in packages):
            raise MissingExtraError(
                f"trackers names {tracker}, which is not installed: pip install {packages[0]}, or remove it from trackers"
            )


@contextmanager
def explained(name: str, what: str = "") -> Iterator[None]:
    """Turn transformers' errors about a checkpoint, and out-of-memory errors, into one line."""
    try:
        with loading.explained(f"{what} {name}".strip()):
            yield
    except Exception as problem:
        explain_memory(problem)
        raise


def explain_memory(problem: BaseException) -> None:
    """Raise DeviceMemoryError if the problem is a lack of memory.

    Raises:
        DeviceMemoryError: the memory does not suffice.
    """
    if is_out_of_memory(problem):
        raise DeviceMemoryError(
            "out of memory: lower micro_batch_size, set gradient_checkpointing to true or use more GPUs with fsdp2.yaml; then run the same "
            "command again, which resumes from the last checkpoint"
        ) from None
