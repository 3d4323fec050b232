"""Opens the models and texts that a recipe names, before anything large is loaded, and chooses what
the recipe leaves open by the config and the tokenizer of the student.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from gqa_convert.checkpoint.fingerprint import fingerprint
from gqa_convert.checkpoint.provenance import PROVENANCE, earlier_record
from gqa_convert.checkpoint.source import Checkpoint, open_local
from gqa_convert.data.model_tokenizer import check_vocabulary, decoder_start, starts_with_last
from gqa_convert.data.objectives import OBJECTIVES
from gqa_convert.data.sampler import SampleSettings
from gqa_convert.data.samples import EvaluationBlocks, Samples, evaluation_blocks, open_samples
from gqa_convert.data.sources import KINDS, DatasetCommits, find_commits
from gqa_convert.data.token_files import OnTokenize, default_cache
from gqa_convert.errors import InterruptedRunError, RecipeError, StoppedError
from gqa_convert.families.context_length import SPAN_LENGTH, block_length, stated_positions
from gqa_convert.families.loading import (
    check_language_model,
    explained,
    hears,
    is_encoder_decoder,
    load_tokenizer,
)
from gqa_convert.processes import Say, by_first, check_agreement, rank, together
from gqa_convert.runtime.json_objects import Config, JsonObject, Result

from .recipe import Recipe, read_recipe

NEEDS_HEAD = (
    "uptraining trains the predictions of one; name the language model that the checkpoint was "
    "made from"
)
"""Advice for a checkpoint that was saved without its language-model head."""


class Opened(NamedTuple):
    """What is known of a run before its models are loaded.

    Attributes:
        recipe: with the commits of Hub datasets.
        models: the checkpoint that is trained, and that of the teacher if there is one.
        dataset_commits: the commits of the recipe's Hub datasets.
        samples: the training samples, as many as the whole budget takes.
        held_out: the held-out text; None without evaluation_data.
        inputs: what a run must find as it was when it resumes, as messages call it, each with a
            fingerprint.
    """

    recipe: Recipe
    models: list[Checkpoint]
    dataset_commits: DatasetCommits
    samples: Samples
    held_out: EvaluationBlocks | None
    inputs: dict[str, str]


def open_recipe(
    recipe: Recipe, known: DatasetCommits, progress: OnTokenize, say: Say = lambda _: None
) -> Opened:
    """Read the configs and tokenizers of a recipe's models, and open its texts. The main process
    finds commits that are not known, so that all machines read the same text.

    Args:
        recipe: of the run.
        known: commits of Hub datasets that an earlier part of the run has read.
        progress: called with a source of text, what is tokenised and the total.
        say: called with notes on the models.

    Raises:
        RecipeError: objective, sequence length or teacher don't suit the model.
        DataError: the text can't be used.
        GQAConvertError: a checkpoint can't be used.
    """
    inputs = {}
    models = []
    with together():
        for role, name in (("model", recipe.model), ("teacher", recipe.teacher)):
            if name:
                opened = open_local(name)
                check_language_model(name, opened.config, NEEDS_HEAD)
                inputs[f"the checkpoint of {role}"] = fingerprint(opened)
                models.append(opened)
        student, *teachers = models
        settings = sample_settings(recipe, student)
        for teacher in teachers:
            if is_encoder_decoder(student.config) != is_encoder_decoder(teacher.config):
                raise RecipeError(
                    f"one of model and teacher ({recipe.model}, {recipe.teacher}) is an "
                    "encoder-decoder and the other is not: name the source of model as teacher"
                )
            with explained(f"the tokenizer of {recipe.teacher}"):
                check_vocabularies(student.local_folder, teacher.local_folder)
        if earlier_record(student) is None:
            say(
                f"{recipe.model} has no {PROVENANCE}: it was not converted by gqa-convert and is "
                "trained unchanged"
            )
    for note in student.notes:
        say(f"{recipe.model}: {note}")
    commits = by_first(lambda: find_commits((*recipe.data, *(recipe.evaluation_data or ())), known))
    pinned = recipe.pinned(commits)
    held_out = None
    most = recipe.budget_tokens + recipe.tokens_per_step  # the last step may go beyond the budget
    # the first process alone makes the tokens; then the others find them, or make those of another
    # machine's cache
    for is_first in (True, False):
        with together():
            if (rank() == 0) is is_first:
                samples = open_samples(
                    pinned.data, settings, progress, tokens=most, seed=recipe.seed
                )
                if pinned.evaluation_data:
                    held_out = evaluation_blocks(
                        pinned.evaluation_data, settings, progress, tokens=recipe.evaluation_tokens
                    )
                check_tokens(models, samples, held_out)
    inputs["the training text or the tokenizer"] = samples.fingerprint
    if held_out is not None:
        inputs["the evaluation data"] = held_out.fingerprint
    check_agreement(inputs)
    return Opened(pinned, models, commits, samples, held_out, inputs)


def check_tokens(
    models: list[Checkpoint], samples: Samples, held_out: EvaluationBlocks | None
) -> None:
    """Refuse text with tokens that a model has no embedding of.

    Raises:
        DataError: there is such a token.
    """
    found = [tokens.largest for tokens in samples.sources]
    batches = [samples.batch([0])]  # has the tokens that an objective adds
    if held_out is not None:
        batches.append(held_out.batch(range(len(held_out))))
    for batch in batches:
        found += [ids.max() for name, ids in batch.items() if name != "position_ids"]
    largest = max(found)
    for model in models:
        check_vocabulary(model.config, int(largest), model.local_folder)


def sample_settings(recipe: Recipe, student: Checkpoint) -> SampleSettings:
    """The settings of a run's samples, from the config and the tokenizer of its model alone.
    Without a stated length, a sample is as long as the model's context, at most 512 tokens for an
    encoder-decoder.

    Raises:
        RecipeError: objective or sequence length don't suit the model.
    """
    config = student.config
    with explained(f"the tokenizer of {recipe.model}"):
        tokenizer = load_tokenizer(student.local_folder)
    objective = choose_objective(recipe, config)
    stated = recipe.sequence_length
    context = stated_positions(config)
    if stated and context and stated > context:
        raise RecipeError(
            f"sequence_length is {stated} and {recipe.model} has positions for {context}: lower it"
        )
    length = block_length(config)
    start = None
    if is_encoder_decoder(config):
        length = min(length, SPAN_LENGTH)
        start = decoder_start(student.local_folder, config, tokenizer)
    if recipe.document_masks and objective != "causal":
        raise RecipeError(
            f"document_masks is true and objective is {objective}, whose samples are whole or "
            "corrupted texts: remove document_masks"
        )
    return SampleSettings(
        tokenizer,
        objective,
        stated or length,
        start,
        starts_with_last(config),
        recipe.document_masks,
    )


def choose_objective(recipe: Recipe, config: Config) -> str:
    """The objective that a recipe names, or the first that suits the model and the data if it names
    none.

    Raises:
        RecipeError: the objective does not suit the model; the message names the alternatives. Or
            the model hears.
    """
    if hears(config):
        raise RecipeError(
            f"{recipe.model} is a model that hears, which is trained by `convert --calibration "
            "SOUNDS` alone: name a model that reads text"
        )
    kind = "an encoder-decoder" if is_encoder_decoder(config) else "a decoder-only model"
    held = recipe.data[0].kind
    suiting = {name: each for name, each in OBJECTIVES.items() if each.models == kind}
    if recipe.objective in suiting:
        return recipe.objective
    words = []
    for name, objective in suiting.items():
        if recipe.objective == "auto" and held in objective.reads:
            return name
        words.append(f"{name}, on {' or '.join(KINDS[read] for read in objective.reads)}")
    raise RecipeError(
        f"objective is {recipe.objective}, data holds {KINDS[held]} and {recipe.model} is {kind}: "
        f"use the objective {' or '.join(words)}"
    )


def check_vocabularies(student: Path, teacher: Path) -> None:
    """Check that student and teacher mean the same tokens; their vocabulary sizes may differ by
    padding.

    Only tokenizers are read, so that a mismatch is found before any model is loaded.

    Args:
        student, teacher: local checkpoints with their tokenizers.

    Raises:
        RecipeError: an id stands for different tokens.
    """
    tokens, others = (load_tokenizer(folder).get_vocab().items() for folder in (student, teacher))
    if different := tokens - others:
        token, number = min(different, key=itemgetter(1))
        raise RecipeError(
            f"token {number} is {token!r} for the student {student} and another one for the "
            f"teacher {teacher} ({len(different)} ids differ): distillation needs a teacher with "
            "the student's vocabulary"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedRecipe(Result):
    """What `uptrain --tokenize-only` has made.

    Attributes:
        cache: the folder in which a run finds the tokens.
        sources: of the training text, as the recipe names them: `source`, `revision` (the commit of
            a Hub dataset; None for files), `tokens` that are ready, and whether they are
            `complete`; a stream is tokenised as far as the run needs it.
        steps, samples: of the run, for its whole budget.
    """

    cache: str
    sources: list[JsonObject]
    steps: int
    samples: int


def tokenize_recipe(
    path: str | Path, overrides: Sequence[str] = (), *, on_tokenize: OnTokenize = lambda *_: None
) -> TokenizedRecipe:
    """Tokenise the text of a recipe into the cache in which its run looks for it. A call that was
    stopped is continued by the next one. Hub datasets are streams, which are tokenised as far as
    the budget of the run needs them.

    Args:
        path: the path of the recipe.
        overrides: `key=value` pairs that replace values of the recipe.
        on_tokenize: called with a source, what is tokenised and the total: bytes of files, tokens
            of streams.

    Raises:
        RecipeError: the recipe is wrong, or its objective does not suit the model.
        DataError: the text can't be used.
        StoppedError: a signal asked to stop; what is ready is kept.
    """
    recipe = read_recipe(path, overrides)
    try:
        opened = open_recipe(recipe, {}, on_tokenize)
    except InterruptedRunError as stopped:
        reason = str(stopped).split(":")[0]
        raise StoppedError(
            f"{reason}: what is ready is kept, run the same command again to resume"
        ) from None
    samples = opened.samples
    sources = []
    for stated, tokens in zip(opened.recipe.data, samples.sources, strict=True):
        kept = {"tokens": tokens.size, "complete": tokens.complete}
        sources.append({"source": stated.source, "revision": stated.revision, **kept})
    steps = recipe.steps(samples.tokens_per_sample)
    count = steps * recipe.samples_per_step(samples.tokens_per_sample)
    return TokenizedRecipe(cache=str(default_cache()), sources=sources, steps=steps, samples=count)
