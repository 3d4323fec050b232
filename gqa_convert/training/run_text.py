"""Opens the training and the held-out text of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gqa_convert.checkpoint.atomic_files import write_whole
from gqa_convert.data.hub import default_cache
from gqa_convert.data.objectives import SampleSettings
from gqa_convert.data.samples import EvaluationBlocks, Samples, TokenCache, evaluation_blocks, open_samples
from gqa_convert.data.sources import DatasetCommits, Source, find_commits
from gqa_convert.data.text_generation import own_text
from gqa_convert.data.token_files import OnTokenize
from gqa_convert.errors import RecipeError
from gqa_convert.training.distributed import broadcast, gathered
from gqa_convert.training.opening import Opened
from gqa_convert.training.recipe import Recipe
from gqa_convert.training.run_context import RunContext


@dataclass(frozen=True, slots=True)
class RunText:
    """The texts of a run.

    Attributes:
        samples: the training samples.
        held_out: the held-out text; None without evaluation_data.
        dataset_commits: the commits of the recipe's Hub datasets.
        pinned: the recipe with these commits.
    """

    samples: Samples
    held_out: EvaluationBlocks | None
    dataset_commits: DatasetCommits
    pinned: Recipe


def open_text(context: RunContext, opened: Opened, known: DatasetCommits, on_tokenize: OnTokenize) -> RunText:
    """Open the texts of a run. The main process finds commits that are not known, so that all machines read the same
    text.

    Args:
        context: the run.
        opened: the models' facts.
        known: commits of Hub datasets that an earlier part of the run has read.
        on_tokenize: called with a source of text, what is tokenised and the total.
    """
    recipe, commits = context.recipe, DatasetCommits()
    with context.together():
        if context.main:
            commits = find_commits((*recipe.data, *(recipe.evaluation_data or ())), known)
    commits = gathered(context.accelerator, commits)[0]
    pinned = recipe.pinned(commits)
    is_local_main = context.accelerator.is_local_main_process
    cache = TokenCache(is_local_main=is_local_main, wait=context.wait, progress=on_tokenize)
    data = [_for_all(context, source, opened.source_folder, on_tokenize) for source in pinned.data]
    with context.together():
        samples = open_run_samples(pinned, data, opened.settings, cache)
    for note in samples.notes:
        context.say(note)
    held_out = None
    if pinned.evaluation_data is not None:
        with context.together():
            held_out = evaluation_blocks(
                pinned.evaluation_data, opened.settings, cache, tokens=pinned.evaluation_tokens
            )
    return RunText(samples, held_out, commits, pinned)


def open_run_samples(recipe: Recipe, data: Sequence[Source], settings: SampleSettings, cache: TokenCache) -> Samples:
    """The samples of a run, as many as its whole budget takes.

    Args:
        recipe: the recipe of the run.
        data: its sources, with files in the place of `self`.
        settings, cache: see `open_samples`.
    """
    most = recipe.budget_tokens + recipe.tokens_per_step  # the last step may go beyond the budget
    return open_samples(data, settings, cache, seed=recipe.seed, tokens=most)


def with_own_text(
    source: Source, model: str, writer: Path | None, progress: OnTokenize, device: str | None = None
) -> Source:
    """A source with a file of the cache in the place of `self`.

    Args:
        source: as the recipe states it.
        model: the name of the model that is trained, for the message.
        writer: the checkpoint that the model was converted from, which writes the text; None if it is not known.
        progress: called with a label, the tokens that are generated and their number.
        device: of the generation; None for a GPU if there is one.

    Raises:
        RecipeError: the writer is not known.
        GQAConvertError: as `own_text`.
    """
    if not source.is_self:
        return source
    if writer is None:
        raise RecipeError(
            f"data is self, and the checkpoint that {model} was converted from is not on this machine: name it as teacher"
        )
    own = own_text(
        writer,
        default_cache(),
        tokens=source.tokens,
        seed=source.seed,
        temperature=source.temperature,
        device=device,
        progress=progress,
    )
    return Source(str(own.file), weight=source.weight)


def _for_all(context: RunContext, source: Source, writer: Path | None, progress: OnTokenize) -> Source:
    """As `with_own_text`, on all processes of a run. The main one generates, and sends the file to machines that do not
    see its cache.
    """
    if not source.is_self:
        return source
    own = source
    with context.together():
        if context.main:
            own = with_own_text(source, context.recipe.model, writer, progress, str(context.accelerator.device))
    name = Path(gathered(context.accelerator, own.source)[0]).name
    file = default_cache() / name
    if not all(gathered(context.accelerator, file.is_file())):
        content = broadcast(context.accelerator, file.read_bytes() if context.main else None)
        with context.together():
            if context.accelerator.is_local_main_process and not file.is_file():
                file.parent.mkdir(parents=True, exist_ok=True)
                write_whole(file, content)
    return Source(str(file), weight=source.weight)
