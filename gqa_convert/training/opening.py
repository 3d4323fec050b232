"""Opens the models and texts that a recipe names, before anything large is loaded, and chooses what the recipe leaves
open by the config and the tokenizer of the student.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from gqa_convert.checkpoint.atomic_files import atomic_file
from gqa_convert.checkpoint.provenance import PROVENANCE, earlier_record
from gqa_convert.checkpoint.source import Checkpoint, open_checkpoint
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.data.decoder_start import decoder_start, starts_with_last
from gqa_convert.data.hub import default_cache
from gqa_convert.data.objectives import OBJECTIVES, ModelKind, SampleSettings
from gqa_convert.data.samples import EvaluationBlocks, Samples, evaluation_blocks, open_samples
from gqa_convert.data.sources import KINDS, DatasetCommits, Source, find_commits
from gqa_convert.data.text_generation import own_text
from gqa_convert.data.token_files import OnTokenize
from gqa_convert.errors import ConfigError, MissingExtraError, RecipeError
from gqa_convert.families import loading
from gqa_convert.families.composite import decoder_config
from gqa_convert.families.config_sizes import VOCABULARY_KEYS
from gqa_convert.families.context_length import SPAN_LENGTH, block_length, stated_count, stated_positions
from gqa_convert.training.distributed import gathered, rank, together
from gqa_convert.training.recipe import Recipe

NEEDS_HEAD = "uptraining trains the predictions of one; name the language model that the checkpoint was made from"
"""Advice for a checkpoint that was saved without its language-model head."""


class Opened(NamedTuple):
    """What is known of a run before its models are loaded.

    Attributes:
        recipe: with the commits of Hub datasets.
        student: the checkpoint that is trained.
        folder: where it is.
        teacher: the folder of the teacher.
        source: the folder of the checkpoint that the student was converted from, if it is on this machine.
        dataset_commits: the commits of the recipe's Hub datasets.
        samples: the training samples, as many as the whole budget takes.
        held_out: the held-out text; None without evaluation_data.
    """

    recipe: Recipe
    student: Checkpoint
    folder: Path
    teacher: Path | None
    source: Path | None
    dataset_commits: DatasetCommits
    samples: Samples
    held_out: EvaluationBlocks | None


def open_recipe(
    recipe: Recipe,
    known: DatasetCommits,
    progress: OnTokenize,
    say: Callable[[str], None] = lambda _: None,
    device: str | None = None,
) -> Opened:
    """Read the configs and tokenizers of a recipe's models, and open its texts. The main process finds commits that are
    not known, so that all machines read the same text.

    Args:
        recipe: of the run.
        known: commits of Hub datasets that an earlier part of the run has read.
        progress: called with a source of text, what is tokenised and the total.
        say: called with notes on the models and the texts.
        device: on which the model writes text; None for a GPU if there is one.

    Raises:
        RecipeError: objective, sequence length or teacher don't suit the model; or data is `self`, and the model that
            writes is not known.
        DataError: the text can't be used.
        GQAConvertError: a checkpoint can't be used.
    """
    teacher_folder = None
    with together():
        student = open_checkpoint(recipe.model, download=True)
        loading.check_language_model(recipe.model, student.config, NEEDS_HEAD)
        settings = sample_settings(recipe, student)
        folder = settings.folder
        if recipe.teacher is not None:
            teacher = open_checkpoint(recipe.teacher, download=True)
            loading.check_language_model(recipe.teacher, teacher.config, NEEDS_HEAD)
            teacher_folder = teacher.folder
            assert teacher_folder is not None
            with loading.explained(f"the tokenizer of {recipe.teacher}"):
                check_vocabularies(folder, teacher_folder)
        record = earlier_record(student)
    if record is None:
        say(f"{recipe.model} has no {PROVENANCE}: it was not converted by gqa-convert and is trained unchanged")
    for note in student.notes:
        say(f"{recipe.model}: {note}")
    source_folder = teacher_folder or _source_of(record)
    commits = DatasetCommits()
    with together():
        if rank() == 0:
            commits = find_commits((*recipe.data, *(recipe.evaluation_data or ())), known)
    commits = gathered(commits)[0]
    pinned, held_out = recipe.pinned(commits), None
    data = [
        _written(source, recipe, source_folder, progress, device) if source.is_self else source
        for source in pinned.data
    ]
    most = recipe.budget_tokens + recipe.tokens_per_step  # the last step may go beyond the budget
    with together():
        samples = open_samples(data, settings, progress, tokens=most, seed=recipe.seed)
        if pinned.evaluation_data is not None:
            held_out = evaluation_blocks(pinned.evaluation_data, settings, progress, tokens=recipe.evaluation_tokens)
    for note in samples.notes:
        say(note)
    return Opened(pinned, student, folder, teacher_folder, source_folder, commits, samples, held_out)


def _written(source: Source, recipe: Recipe, writer: Path | None, progress: OnTokenize, device: str | None) -> Source:
    """A source with a file of the cache in the place of `self`. The main process generates the text, and sends it to
    machines that do not see its cache.
    """
    cache, text = default_cache(), None
    with together():
        if rank() == 0:
            if writer is None:
                raise RecipeError(
                    f"data is self, and the checkpoint that {recipe.model} was converted from is not on this machine: name it as teacher"
                )
            own = own_text(
                writer,
                cache,
                tokens=source.tokens,
                seed=source.seed,
                temperature=source.temperature,
                device=device,
                progress=progress,
            )
            text = own.file.name, own.file.read_bytes()
    name, content = gathered(text)[0]
    file = cache / name
    with together():
        if not file.is_file():
            cache.mkdir(parents=True, exist_ok=True)
            with atomic_file(file, file.with_name(f".{name}.{rank()}")) as handle:
                handle.write(content)
    return replace(source, source=str(file))


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


def model_kind(config: Mapping[str, Any]) -> ModelKind:
    """The kind of a model with this config.json."""
    if loading.hears(dict(config)):
        return "a model that hears"
    return "an encoder-decoder" if loading.is_encoder_decoder(config) else "a decoder-only model"


def choose_objective(recipe: Recipe, config: Mapping[str, Any], tokenizer: Any) -> str:
    """The objective that a recipe names, or the first that suits the model and the data if it names none.

    Raises:
        RecipeError: the objective does not suit the model or its tokenizer; the message names the alternatives.
    """
    kind, held, is_open = model_kind(config), recipe.data[0].kind, recipe.objective == "auto"
    choices, missing = [], ""
    for name, each in OBJECTIVES.items():
        if each.models != kind:
            continue
        if not each.load().suits(tokenizer):
            missing += f", whose tokenizer has no {each.needs} for {name}"
        elif recipe.objective == name or (is_open and held in each.reads):
            return name
        else:
            choices.append(f"{name}, on {' or '.join(KINDS[read] for read in each.reads)}")
    stated = f"data holds {KINDS[held]}" if is_open else f"objective is {recipe.objective}"
    raise RecipeError(f"{stated} and {recipe.model} is {kind}{missing}: use the objective {' or '.join(choices)}")


def sample_length(recipe: Recipe, config: Mapping[str, Any]) -> int:
    """The tokens of a sample: those that the recipe states, or else the model's context length, at most 512 for an
    encoder-decoder.

    Raises:
        RecipeError: the recipe states more than the model has positions for.
    """
    stated, context, usual = recipe.sequence_length, stated_positions(config), block_length(config)
    if stated is not None and context is not None and stated > context:
        raise RecipeError(f"sequence_length is {stated} and {recipe.model} has positions for {context}: lower it")
    return stated or (min(usual, SPAN_LENGTH) if loading.is_encoder_decoder(config) else usual)


def check_vocabularies(student: Path, teacher: Path) -> None:
    """Check that student and teacher mean the same tokens; their vocabulary sizes may differ by padding.

    Only configs and tokenizers are read, so that a mismatch is found before any model is loaded.

    Args:
        student: a local checkpoint with its tokenizer.
        teacher: a local checkpoint; its tokenizer is compared if there is one.

    Raises:
        ConfigError: a config does not state the vocabulary size.
        RecipeError: an id stands for different tokens, or the student's tokenizer has tokens beyond the shared part.
    """
    own, theirs = _vocabulary_size(student), _vocabulary_size(teacher)
    tokens = loading.load_tokenizer(student).get_vocab()
    needed = max(tokens.values(), default=-1) + 1
    if own != theirs and needed > min(own, theirs):
        raise RecipeError(
            f"the teacher {teacher} has logits for {theirs} tokens and the student {student} for {own}, of which its "
            f"tokenizer uses {needed}: distillation needs a teacher with the student's vocabulary"
        )
    files = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
    if not any((teacher / name).is_file() for name in files):
        return
    others = loading.load_tokenizer(teacher).get_vocab()
    different = [(number, token) for token, number in tokens.items() if others.get(token) != number]
    if different:
        number, token = min(different)
        raise RecipeError(
            f"token {number} is {token!r} for the student {student} and another one for the teacher {teacher} ({len(different)} ids differ): "
            "distillation needs a teacher with the student's vocabulary"
        )


def _vocabulary_size(folder: Path) -> int:
    size = stated_count(decoder_config(loading.read_config(folder)), VOCABULARY_KEYS)
    if size is None:
        raise ConfigError(
            f"{folder / 'config.json'} states no vocab_size: distillation must know how many tokens the logits are for"
        )
    return size


def _source_of(record: JsonObject | None) -> Path | None:
    """The source that the student's provenance names, if it is a folder on this machine."""
    try:
        folder = Path((record or {})["source"]["id"])
    except (KeyError, TypeError):
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
