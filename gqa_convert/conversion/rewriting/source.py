"""The source in the form in which it is converted: as it is, or rewritten as a stock type that
computes the same. All that can be refused is refused from headers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from gqa_convert.checkpoint.source import CONFIG, Checkpoint, open_checkpoint
from gqa_convert.checkpoint.source_files import SourceFiles
from gqa_convert.conversion.progress import REWRITING, FitProgress, OnProgress
from gqa_convert.conversion.writing import check_room, copy_files, write_file, write_index
from gqa_convert.errors import OptionError
from gqa_convert.families.table import FAMILIES
from gqa_convert.publishing.atomic_files import write_json
from gqa_convert.publishing.publication import staged_folder
from gqa_convert.runtime.json_objects import Config

from .gpt2 import rewrite_gpt2
from .gpt_neox import rewrite_gpt_neox
from .stock_config import NoStockClassError


class StockType(NamedTuple):
    """A stock type that computes what a model type does.

    Attributes:
        condition: under which it does, for the documentation.
        rewrite: plans the rewriting of a source for a number of K/V heads.
    """

    model_type: str
    stock: str
    condition: str
    rewrite: Callable[[Checkpoint, int], Checkpoint]


STOCK_TYPES = (
    StockType(
        "gpt_neox", "phi", "`use_parallel_residual` (Pythia, GPT-NeoX-20B)", rewrite_gpt_neox
    ),
    StockType(
        "gpt2",
        "gpt_bigcode",
        "one K/V head, no cross-attention, scores scaled by the width of a head alone",
        rewrite_gpt2,
    ),
)


def plan_rewriting(
    checkpoint: Checkpoint, kv_heads: int | Sequence[int] = 1, *, native: bool | None = None
) -> Checkpoint:
    """The source in the form in which it is converted: as it is, or with recipes for the tensors of
    another form.

    Args:
        checkpoint: the source.
        kv_heads: K/V heads per layer in the result.
        native: rewrite types without a K/V-head count for a stock class that has one (True), never
            (False), or where there is one and the number of heads changes (None).

    Raises:
        ConfigError: the tensors do not belong to the config.
        UnsupportedFormatError: a tensor has a type that can't be read in numbers.
        OptionError: `native`, and no stock class computes the same.
    """
    config = checkpoint.config
    model_type = str(config.get("model_type"))
    family = FAMILIES.get(model_type)
    has_count = family is None or family.is_converted or family.modeling is None
    if family is None or has_count or not isinstance(kv_heads, int):
        return checkpoint
    is_copy = kv_heads == config.get(family.heads_key, config.get("num_attention_heads"))
    if native is False or (native is None and is_copy):
        return checkpoint
    try:
        return _rewritten(checkpoint, model_type, kv_heads)
    except NoStockClassError as problem:
        if not native:
            return checkpoint
        raise OptionError(
            f"--native: no stock class computes the same as this {model_type}: {problem}; leave "
            "the option out to get a modelling file"
        ) from None


def _rewritten(checkpoint: Checkpoint, model_type: str, kv_heads: int) -> Checkpoint:
    """A source in the form of its stock type.

    Raises:
        NoStockClassError: it has none.
    """
    if "auto_map" in checkpoint.config:
        raise NoStockClassError(
            f"the checkpoint contains modelling code for {model_type}, which may compute something "
            "else"
        )
    for known in STOCK_TYPES:
        if known.model_type == model_type:
            return known.rewrite(checkpoint, kv_heads)
    raise NoStockClassError(
        f"no stock class is known to compute what {model_type} does with fewer K/V heads"
    )


def needs_rewriting(config: Config, result_type: Any) -> bool:
    """Whether a conversion to a result of this model type begins with a rewriting.

    Args:
        config: the source's.
        result_type: the model type that the result's config states.
    """
    pairs = [(known.model_type, known.stock) for known in STOCK_TYPES]
    return (config.get("model_type"), result_type) in pairs


@contextmanager
def rewritten_folder(
    checkpoint: Checkpoint, out: Path, on_progress: OnProgress = lambda progress: None
) -> Iterator[Checkpoint]:
    """A source in another form, under its name, written into a hidden folder beside `out` that goes
    at the end. One of its tensors and four of the source's are in memory at most.

    Args:
        checkpoint: what `plan_rewriting` made of a source on this machine.
        out: a folder on the disk that has room.
        on_progress: called with the bytes of tensors that are written.

    Raises:
        NonFiniteError: a tensor that is multiplied holds NaN or Inf, or its product does.
        NoSpaceError: the disk cannot hold the result.
        CorruptCheckpointError: a file of the source changed meanwhile.
    """
    total = sum(entry.nbytes for entry in checkpoint.entries.values())
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        on_progress(FitProgress(REWRITING, min(done, total), total))

    with staged_folder(out) as scratch:
        check_room("the rewritten source, beside the result,", total, scratch.path)
        folder = scratch.path / "source"
        folder.mkdir()
        with SourceFiles(checkpoint) as sources:
            for shard in checkpoint.shards:
                write_file(folder / shard.file, shard.tensors, shard.metadata, sources, advance)
            sources.check_unchanged()
        copy_files(checkpoint, folder)
        write_json(folder / CONFIG, checkpoint.config)
        files = {shard.file: shard.tensors for shard in checkpoint.shards}
        write_index(folder, files, checkpoint.index_metadata or {})
        written = open_checkpoint(folder)
        yield replace(
            checkpoint,
            folder=folder,
            shards=written.shards,
            index_metadata=written.index_metadata,
            carried=written.carried,
            files=written.files,
            recipes={},
            tokenizer_defaults={},
        )
