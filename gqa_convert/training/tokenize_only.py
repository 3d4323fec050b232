"""Tokenises the text of a recipe ahead of its run, for which no GPU is needed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gqa_convert.data.token_files import OnTokenize, default_cache
from gqa_convert.errors import InterruptedRunError, StoppedError
from gqa_convert.runtime.json_objects import Result
from gqa_convert.training.opening import open_recipe
from gqa_convert.training.recipe import read_recipe


@dataclass(frozen=True, slots=True)
class TokenizedSource:
    """A source of a recipe.

    Attributes:
        source: as the recipe names it.
        revision: the commit of a Hub dataset; None for files.
        tokens: the tokens that are ready.
        complete: whether they are all of the source; a stream is tokenised as far as the run needs it.
    """

    source: str
    revision: str | None
    tokens: int
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedRecipe(Result):
    """What `uptrain --tokenize-only` has made.

    Attributes:
        cache: the folder in which a run finds the tokens.
        sources: the training text.
        steps, samples: of the run, for its whole budget.
    """

    cache: str
    sources: tuple[TokenizedSource, ...]
    steps: int
    samples: int


def tokenize_recipe(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    on_tokenize: OnTokenize = lambda *_: None,
) -> TokenizedRecipe:
    """Tokenise the text of a recipe into the cache in which its run looks for it. A call that was stopped is continued
    by the next one. Hub datasets are streams, which are tokenised as far as the budget of the run needs them.

    Args:
        path: the path of the recipe.
        overrides: `key=value` pairs that replace values of the recipe.
        on_tokenize: called with a source, what is tokenised and the total: bytes of files, tokens of streams.

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
    sources = tuple(
        TokenizedSource(stated.source, stated.revision, tokens.size, tokens.complete)
        for stated, tokens in zip(opened.recipe.data, samples.sources, strict=True)
    )
    steps = recipe.steps(samples.tokens_per_sample)
    return TokenizedRecipe(
        cache=str(default_cache()),
        sources=sources,
        steps=steps,
        samples=steps * recipe.samples_per_step(samples.tokens_per_sample),
    )
