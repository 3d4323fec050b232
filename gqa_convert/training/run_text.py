"""Opens the training and the held-out text of a run."""

from dataclasses import dataclass
from typing import Any

from gqa_convert.text.dataset_commits import DatasetCommits, find_commits
from gqa_convert.text.samples import Samples, evaluation_blocks, open_samples
from gqa_convert.text.token_files import default_cache
from gqa_convert.training.distributed import gathered
from gqa_convert.training.loop import Batch
from gqa_convert.training.opening import Opened
from gqa_convert.training.own_text import shared
from gqa_convert.training.recipe import Recipe
from gqa_convert.training.run_context import RunContext


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The held-out text of a run, in batches; empty without evaluation_data.

    Attributes:
        batches: batches of the size of a micro-batch.
        fingerprint: a hash of the text and the settings.
    """

    batches: tuple[Batch, ...] = ()
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class RunText:
    """The texts of a run.

    Attributes:
        samples: the training samples.
        held_out: the held-out text.
        dataset_commits: the commits of the recipe's Hub datasets.
        pinned: the recipe with these commits.
    """

    samples: Samples
    held_out: HeldOut
    dataset_commits: DatasetCommits
    pinned: Recipe


def open_text(context: RunContext, opened: Opened, known: DatasetCommits, on_tokenize: Any) -> RunText:
    """Open the texts of a run. The main process finds commits that are not known, so that all machines read the same
    text.

    Args:
        context: the run.
        opened: the models' facts.
        known: commits of Hub datasets that an earlier part of the run has read.
        on_tokenize: called with a source of text, the bytes tokenised and their total.
    """
    commits = _commits(context, known)
    pinned = context.recipe.pinned(commits)
    # of training and held-out samples alike
    settings: dict[str, Any] = {
        "objective": opened.objective,
        "sequence_length": opened.sequence_length,
        "document_mask": context.recipe.document_mask,
        "decoder_start": opened.decoder_start,
        "starts_with_last": opened.starts_with_last,
        "is_local_main": context.accelerator.is_local_main_process,
        "wait": context.wait,
        "progress": on_tokenize,
    }
    samples = _open_samples(context, pinned, opened, settings)
    return RunText(samples, _open_held_out(context, pinned, opened, settings), commits, pinned)


def _commits(context: RunContext, known: DatasetCommits) -> DatasetCommits:
    recipe, found = context.recipe, DatasetCommits()
    with context.together():
        if context.main:
            found = find_commits((*recipe.data, *(recipe.evaluation_data or ())), known, default_cache())
    commits: DatasetCommits = gathered(context.accelerator, found)[0]
    return commits


def _open_samples(context: RunContext, pinned: Recipe, opened: Opened, settings: dict[str, Any]) -> Samples:
    data = shared(context, pinned.data, opened.source_folder, settings["progress"])
    with context.together():
        samples = open_samples(
            data, opened.tokenizer, seed=pinned.seed, shuffle_window=pinned.shuffle_window, **settings
        )
    for note in samples.notes:
        context.say(note)
    return samples


def _open_held_out(context: RunContext, pinned: Recipe, opened: Opened, settings: dict[str, Any]) -> HeldOut:
    if pinned.evaluation_data is None:
        return HeldOut()
    with context.together():
        blocks = evaluation_blocks(
            pinned.evaluation_data, opened.tokenizer, tokens=pinned.evaluation_tokens, **settings
        )
    size = pinned.micro_batch_size
    batches = (blocks.batch(range(at, min(at + size, len(blocks)))) for at in range(0, len(blocks), size))
    return HeldOut(tuple(batches), blocks.fingerprint)
