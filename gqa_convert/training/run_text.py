"""Opens the training and the held-out text of a run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gqa_convert.checkpoint.atomic_files import write_whole
from gqa_convert.errors import RecipeError
from gqa_convert.text.dataset_commits import DatasetCommits, find_commits
from gqa_convert.text.own_text import own_text
from gqa_convert.text.samples import Samples, evaluation_blocks, open_samples
from gqa_convert.text.sources import Source
from gqa_convert.text.token_files import default_cache
from gqa_convert.training.distributed import gathered
from gqa_convert.training.opening import Opened
from gqa_convert.training.recipe import Recipe
from gqa_convert.training.run_context import RunContext

Batch = dict[str, np.ndarray[Any, Any]]
OnTokenize = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class RunText:
    """The texts of a run.

    Attributes:
        samples: the training samples.
        held_out: the held-out text in batches of the size of a micro-batch; empty without evaluation_data.
        held_out_fingerprint: a hash of the held-out text and the settings.
        dataset_commits: the commits of the recipe's Hub datasets.
        pinned: the recipe with these commits.
    """

    samples: Samples
    held_out: list[Batch]
    held_out_fingerprint: str
    dataset_commits: DatasetCommits
    pinned: Recipe


def open_text(context: RunContext, opened: Opened, known: DatasetCommits, on_tokenize: OnTokenize) -> RunText:
    """Open the texts of a run. The main process finds commits that are not known, so that all machines read the same
    text.

    Args:
        context: the run.
        opened: the models' facts.
        known: commits of Hub datasets that an earlier part of the run has read.
        on_tokenize: called with a source of text, the bytes tokenised and their total.
    """
    recipe, commits = context.recipe, DatasetCommits()
    with context.together():
        if context.main:
            commits = find_commits((*recipe.data, *(recipe.evaluation_data or ())), known, default_cache())
    commits = gathered(context.accelerator, commits)[0]
    pinned = recipe.pinned(commits)
    # of training and held-out samples alike
    settings: dict[str, Any] = {
        "objective": opened.objective,
        "sequence_length": opened.sequence_length,
        "document_mask": recipe.document_mask,
        "decoder_start": opened.decoder_start,
        "starts_with_last": opened.starts_with_last,
        "is_local_main": context.accelerator.is_local_main_process,
        "wait": context.wait,
        "progress": on_tokenize,
    }
    data = _own_text_for_all(context, pinned.data, opened.source_folder, on_tokenize)
    with context.together():
        samples = open_samples(data, opened.tokenizer, seed=pinned.seed, **settings)
    for note in samples.notes:
        context.say(note)
    if pinned.evaluation_data is None:
        return RunText(samples, [], "", commits, pinned)
    with context.together():
        blocks = evaluation_blocks(
            pinned.evaluation_data, opened.tokenizer, tokens=pinned.evaluation_tokens, **settings
        )
    size = pinned.micro_batch_size
    held_out = [blocks.batch(range(at, min(at + size, len(blocks)))) for at in range(0, len(blocks), size)]
    return RunText(samples, held_out, blocks.fingerprint, commits, pinned)


def with_own_text(
    sources: Sequence[Source], model: str, writer: Path | None, progress: OnTokenize, device: str | None = None
) -> tuple[Source, ...]:
    """Sources in which a file of the cache is in the place of `self`.

    Args:
        sources: as the recipe states them.
        model: the name of the model that is trained, for the message.
        writer: the checkpoint that the model was converted from, which writes the text; None if it is not known.
        progress: called with a label, the tokens that are generated and their number.
        device: of the generation; None for a GPU if there is one.

    Raises:
        RecipeError: the writer is not known.
        GQAConvertError: as `own_text`.
    """
    found = []
    for source in sources:
        if not source.is_self:
            found.append(source)
            continue
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
        found.append(Source(str(own.file), weight=source.weight))
    return tuple(found)


def _own_text_for_all(
    context: RunContext, sources: Sequence[Source], writer: Path | None, progress: OnTokenize
) -> tuple[Source, ...]:
    """As `with_own_text`, on all processes of a run. The main one generates, and sends the files to the others, whose
    machines may not see its cache.
    """
    found: list[Source] = []
    for source in sources:
        if not source.is_self:
            found.append(source)
            continue
        own, content = source, b""
        with context.together():
            if context.main:
                device = str(context.accelerator.device)
                (own,) = with_own_text([source], context.recipe.model, writer, progress, device)
                content = Path(own.source).read_bytes()
        own, content = gathered(context.accelerator, (own, content))[0]
        file = default_cache() / Path(own.source).name
        with context.together():
            if context.accelerator.is_local_main_process and not file.is_file():
                file.parent.mkdir(parents=True, exist_ok=True)
                write_whole(file, content)
        found.append(replace(own, source=str(file)))
    return tuple(found)
