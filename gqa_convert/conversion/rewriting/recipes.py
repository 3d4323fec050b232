"""A source in another form: a checkpoint whose tensors are computed as they are read."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from gqa_convert.checkpoint.headers import Header, TensorEntry
from gqa_convert.checkpoint.source import Checkpoint, Recipe, Shard
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.conversion.plan.files import safetensors_name

Compute = Callable[..., Any]
"""One of `arrays`: makes an array from its numpy type and those of the source."""


@dataclass(frozen=True, slots=True)
class RewrittenTensor:
    """A tensor of the source's other form."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: int
    """The number of the source's file in whose place it stands."""
    sources: tuple[str, ...]
    """The tensors of the source that it is computed from."""
    compute: Compute | None = None
    """None if it has the bytes of the one source."""


def in_another_form(
    source: Checkpoint, config: JsonObject, tensors: Iterable[RewrittenTensor], notes: tuple[str, ...], **fields: Any
) -> Checkpoint:
    """A checkpoint of these tensors, whose folder is the source's, where the sidecar files lie.

    Args:
        source: the source as the user named it.
        config: of the other form.
        tensors: all of them; each file has them in this order.
        notes: sentences on what differs from the source.
        fields: further fields of the checkpoint that differ from the source's.
    """
    files: list[dict[str, TensorEntry]] = [{} for _ in source.shards]
    recipes = {}
    for tensor in tensors:
        files[tensor.shard][tensor.name] = TensorEntry.planned(tensor.dtype, tensor.shape)
        recipes[tensor.name] = Recipe(tensor.sources, tensor.compute)
    shards = []
    for shard, entries in zip(source.shards, files, strict=True):
        if entries:
            shards.append(Shard(safetensors_name(shard.file), 0, Header(entries, shard.header.metadata, 0)))
    return replace(
        source,
        config=config,
        weights_format="safetensors",
        shards=tuple(shards),
        recipes=recipes,
        rewritten_from=source,
        rewriting_notes=notes,
        **fields,
    )
