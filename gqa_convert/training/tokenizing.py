"""Tokenises the text of a recipe ahead of its run, for which no GPU is needed."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.results import Result
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.errors import InterruptedRunError, StoppedError
from gqa_convert.families import loading
from gqa_convert.text.dataset_commits import find_commits
from gqa_convert.text.decoder_start import decoder_start, starts_with_last
from gqa_convert.text.objectives import PAIRS
from gqa_convert.text.samples import evaluation_blocks, open_samples
from gqa_convert.text.sources import Source
from gqa_convert.text.token_files import default_cache
from gqa_convert.training.objectives import check_input, choose_objective, sample_length
from gqa_convert.training.opening import explained, source_folder
from gqa_convert.training.recipe import Recipe, read_recipe
from gqa_convert.training.run_text import with_own_text


@dataclass(frozen=True, slots=True)
class TokenizedSource:
    """A source of a recipe.

    Attributes:
        source: as the recipe names it.
        revision: the commit of a Hub dataset; None for files.
        tokens: the tokens that are ready; None for pairs.
        pairs: the pairs that are ready; None for running text.
        complete: whether they are all of the source; a stream is tokenised as far as the run needs it.
    """

    source: str
    revision: str | None
    tokens: int | None
    pairs: int | None
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedRecipe(Result):
    """What `uptrain --tokenize-only` has made.

    Attributes:
        cache: the folder in which a run finds the tokens.
        sources: the training text.
        evaluation_sources: the held-out text, if there is any.
        steps, samples: of the run, for its whole budget.
        processes: how many processes tokenised files.
        seconds: how long it took.
    """

    cache: str
    sources: tuple[TokenizedSource, ...]
    evaluation_sources: tuple[str, ...]
    steps: int
    samples: int
    processes: int
    seconds: float


def tokenize_recipe(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    processes: int | None = None,
    on_tokenize: Callable[[str, int, int], None] = lambda label, done, total: None,
) -> TokenizedRecipe:
    """Tokenise the text of a recipe into the cache in which its run looks for it.

    Files are tokenised by many processes, and a call that was stopped is continued by the next one. Hub datasets are
    streams, which one process tokenises, with threads, as far as the budget of the run needs them.

    Args:
        path: the path of the recipe.
        overrides: `key=value` pairs that replace values of the recipe.
        processes: how many processes tokenise files; by default one for each core that may be used.
        on_tokenize: called with a source, what is done and the total: bytes of files, samples of streams.

    Raises:
        RecipeError: the recipe is wrong, or its objective does not suit the model.
        DataError: the text can't be used.
        StoppedError: a signal asked to stop; the parts that are ready are kept.
    """
    began = time.monotonic()
    count = processes or len(os.sched_getaffinity(0))
    recipe = read_recipe(path, overrides)
    try:
        return _tokenized(recipe, count, on_tokenize, began)
    except InterruptedRunError as stopped:
        reason = str(stopped).split(":")[0]
        raise StoppedError(
            f"{reason}: the parts that are ready are kept, run the same command again to resume"
        ) from None


def _tokenized(
    recipe: Recipe, processes: int, on_tokenize: Callable[[str, int, int], None], began: float
) -> TokenizedRecipe:
    settings = text_settings(recipe)
    named = (*recipe.data, *(recipe.evaluation_data or ()))
    pinned = recipe.pinned(find_commits(named, {}, default_cache()))
    samples = open_samples(
        with_own_text(pinned.data, recipe.model, source_folder(recipe), on_tokenize),
        seed=recipe.seed,
        processes=processes,
        progress=on_tokenize,
        **settings,
    )
    try:
        steps = recipe.steps(samples.tokens_per_sample)
        number = steps * recipe.samples_per_step(samples.tokens_per_sample)
        samples.fetch(number, on_tokenize)
        sizes = samples.sizes()
    finally:
        samples.close()
    if pinned.evaluation_data is not None:
        evaluation_blocks(
            pinned.evaluation_data,
            tokens=recipe.evaluation_tokens,
            processes=processes,
            progress=on_tokenize,
            **settings,
        )
    holds_pairs = settings["objective"] == PAIRS
    return TokenizedRecipe(
        cache=str(default_cache()),
        sources=tuple(
            _source(stated, size, complete, holds_pairs)
            for stated, (size, complete) in zip(pinned.data, sizes, strict=True)
        ),
        evaluation_sources=tuple(source.source for source in pinned.evaluation_data or ()),
        steps=steps,
        samples=number,
        processes=processes,
        seconds=round(time.monotonic() - began, 1),
    )


def _source(stated: Source, size: int, complete: bool, holds_pairs: bool) -> TokenizedSource:
    tokens, pairs = (None, size) if holds_pairs else (size, None)
    return TokenizedSource(stated.source, stated.revision, tokens, pairs, complete)


def text_settings(recipe: Recipe) -> dict[str, Any]:
    """The settings of the run's samples, from the config and the tokenizer of its model alone."""
    student = open_checkpoint(recipe.model, download=True)
    assert student.folder is not None
    check_input(recipe.model, student.config)
    with explained(recipe.model, "the tokenizer of"):
        tokenizer = loading.load_tokenizer(student.folder)
    encoder_decoder = loading.is_encoder_decoder(student.config)
    return {
        "tokenizer": tokenizer,
        "objective": choose_objective(recipe, student.config, tokenizer),
        "sequence_length": sample_length(recipe, student.config),
        "document_mask": recipe.document_mask,
        "decoder_start": decoder_start(student.folder, student.config, tokenizer) if encoder_decoder else None,
        "starts_with_last": starts_with_last(student.config),
    }
