"""A source in another form: a checkpoint whose tensors are computed as they are read."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gqa_convert.checkpoint.headers import TensorEntry
from gqa_convert.checkpoint.source import Checkpoint, Recipe, Shard
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.conversion.plan.files import safetensors_name

Shape = tuple[int, ...]
Compute = Callable[..., Any]
"""One of `arrays`: makes an array from its numpy type and those of the source."""


class OtherForm:
    """Collects the tensors of another form of a source.

    Args:
        source: the source as the user named it.

    Attributes:
        recipes: how each tensor comes from the source's.
    """

    def __init__(self, source: Checkpoint) -> None:
        self.recipes: dict[str, Recipe] = {}
        self._source = source
        self._files: list[dict[str, TensorEntry]] = [{} for _ in source.shards]

    def add(
        self, name: str, dtype: str, shape: Shape, shard: int, sources: tuple[str, ...], compute: Compute | None = None
    ) -> None:
        """Add a tensor. Each file has its tensors in the order in which they are added.

        Args:
            name: of the tensor.
            dtype: of the tensor.
            shape: of the tensor.
            shard: the number of the source's file in whose place it stands.
            sources: the tensors of the source that it is computed from.
            compute: None if it has the bytes of the one source.
        """
        self._files[shard][name] = TensorEntry.planned(dtype, shape)
        self.recipes[name] = Recipe(sources, compute)

    def checkpoint(self, config: JsonObject, notes: tuple[str, ...], **fields: Any) -> Checkpoint:
        """A checkpoint of these tensors, whose folder is the source's, where the sidecar files lie.

        Args:
            config: of the other form.
            notes: sentences on what differs from the source.
            fields: further fields of the checkpoint that differ from the source's.
        """
        shards = []
        for shard, entries in zip(self._source.shards, self._files, strict=True):
            if entries:
                shards.append(Shard(safetensors_name(shard.file), 0, entries, shard.metadata))
        return replace(
            self._source,
            config=config,
            weights_format="safetensors",
            shards=tuple(shards),
            recipes=self.recipes,
            rewritten_from=self._source,
            rewriting_notes=notes,
            **fields,
        )
