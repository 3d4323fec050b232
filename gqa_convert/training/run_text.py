"""Opens the training and the held-out text of a run."""

from dataclasses import dataclass
from pathlib import Path

from gqa_convert.checkpoint.atomic_files import write_whole
from gqa_convert.data.samples import EvaluationBlocks, Samples, TokenCache, evaluation_blocks, open_samples
from gqa_convert.data.sources import DatasetCommits, Source, find_commits
from gqa_convert.data.text_generation import own_text
from gqa_convert.errors import RecipeError
from gqa_convert.training.distributed import gathered, rank, together
from gqa_convert.training.opening import Opened
from gqa_convert.training.recipe import Recipe


@dataclass(frozen=True, slots=True)
class RunText:
    """The texts of a run.

    Attributes:
        samples: the training samples, as many as the whole budget takes.
        held_out: the held-out text; None without evaluation_data.
        dataset_commits: the commits of the recipe's Hub datasets.
        recipe: the recipe with these commits.
    """

    samples: Samples
    held_out: EvaluationBlocks | None
    dataset_commits: DatasetCommits
    recipe: Recipe


def open_text(
    recipe: Recipe, opened: Opened, cache: TokenCache, known: DatasetCommits, device: str | None = None
) -> RunText:
    """Open the texts of a run. The main process finds commits that are not known, so that all machines read the same
    text.

    Args:
        recipe: of the run.
        opened: the models' facts.
        cache: of the tokens.
        known: commits of Hub datasets that an earlier part of the run has read.
        device: on which the model writes text; None for a GPU if there is one.

    Raises:
        RecipeError: data is `self`, and the model that writes is not known.
        DataError: the text can't be used.
    """
    commits = DatasetCommits()
    with together():
        if rank() == 0:
            commits = find_commits((*recipe.data, *(recipe.evaluation_data or ())), known)
    commits = gathered(commits)[0]
    pinned = recipe.pinned(commits)
    data = [_written(source, recipe.model, opened.source_folder, cache, device) for source in pinned.data]
    most = recipe.budget_tokens + recipe.tokens_per_step  # the last step may go beyond the budget
    held_out = None
    with together():
        samples = open_samples(data, opened.settings, cache, seed=recipe.seed, tokens=most)
    if pinned.evaluation_data is not None:
        with together():
            held_out = evaluation_blocks(
                pinned.evaluation_data, opened.settings, cache, tokens=recipe.evaluation_tokens
            )
    return RunText(samples, held_out, commits, pinned)


def _written(source: Source, model: str, writer: Path | None, cache: TokenCache, device: str | None) -> Source:
    """A source with a file of the cache in the place of `self`. The main process generates the text, and sends it to
    machines that do not see its cache.
    """
    if not source.is_self:
        return source
    text = None
    with together():
        if rank() == 0:
            if writer is None:
                raise RecipeError(
                    f"data is self, and the checkpoint that {model} was converted from is not on this machine: name it as teacher"
                )
            own = own_text(
                writer,
                cache.folder,
                tokens=source.tokens,
                seed=source.seed,
                temperature=source.temperature,
                device=device,
                progress=cache.progress,
            )
            text = own.file.name, own.file.read_bytes()
    name, content = gathered(text)[0]
    file = cache.folder / name
    with together():
        if cache.is_local_main and not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, content)
    return Source(str(file), weight=source.weight)
