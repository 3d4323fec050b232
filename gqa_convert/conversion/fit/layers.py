"""Merges a checkpoint's attention layers one by one from the weights alone, and lets the writer read merged layers."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from gqa_convert.checkpoint.dtypes import DTYPES
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.checkpoint.source_files import SourceFiles
from gqa_convert.conversion.fit.merged_layers import MergedLayers
from gqa_convert.conversion.plan import OutputShard, OutputTensor, Plan
from gqa_convert.errors import NonFiniteError
from gqa_convert.families.geometry import AttentionFinder, AttentionLayer
from gqa_convert.merging.folding.constraints import find_folding_constraints
from gqa_convert.merging.folding.fitted_error import fitted_errors
from gqa_convert.merging.folding.head_order import noted, order_heads, ordered
from gqa_convert.merging.folding.heads import LayerTensors, Tensors
from gqa_convert.merging.folding.merge import merge_layer

LayerDone = Callable[[int, int, dict[str, Any]], None]
"""Called with the number of layers done, of all, and what was noted of the last: its module and errors. Once all are
done, in the stage that trains them together, with `kl_step` (steps done, all), and at its end with `kl` (before,
after)."""


class SourceTensors:
    """Reads a checkpoint's tensors whole, by name.

    Args:
        checkpoint: a local one.
        files: its weight files.
    """

    def __init__(self, checkpoint: Checkpoint, files: SourceFiles) -> None:
        self._files = files
        self._targets = {name: (number, entry) for number, name, entry in checkpoint.tensors()}

    def __call__(self, name: str) -> Any:
        """The tensor, in the type of the file.

        Raises:
            NonFiniteError: it holds NaN or Inf.
        """
        number, entry = self._targets[name]
        block = np.empty(entry.nbytes, np.uint8)
        self._files[number].read_into(block.data, entry.start)
        array = block.view(DTYPES[entry.dtype]).reshape(entry.shape)
        if not np.isfinite(array).all():
            raise NonFiniteError(
                f"tensor {name} holds NaN or Inf, which would spread to every merged head: repair the checkpoint first"
            )
        return array


def attention_of(plan: Plan) -> AttentionFinder:
    """The finder that a plan was made with."""
    return AttentionFinder(
        plan.checkpoint, plan.family, encoder=any(layer.attention_kind == "encoder" for layer in plan.layers)
    )


def merge_layers(plan: Plan, store: MergedLayers, on_layer: LayerDone) -> dict[str, float]:
    """Merge every layer by the plan's method, from the weights alone.

    Args:
        plan: of method `align` or `factor`.
        store: where merged layers go; those that it holds already are not made again.
        on_layer: called as each is done.

    Returns:
        The relative errors of keys and values, by names of tensors.

    Raises:
        NonFiniteError: a tensor holds NaN or Inf.
    """
    finder = attention_of(plan)
    errors: dict[str, float] = {}
    with ExitStack() as stack:
        read = SourceTensors(plan.checkpoint, SourceFiles(plan.checkpoint, store.path, stack))
        for number, layer in enumerate(finder.layers):
            record = store.record(number)
            if record is None:
                record = _merge_layer(plan, finder, layer, read, store, number)
            errors |= {f"{layer.module}.{part}": record[part] for part in ("keys", "values")}
            on_layer(number + 1, len(finder.layers), record)
    return errors


def _merge_layer(
    plan: Plan, finder: AttentionFinder, layer: AttentionLayer, read: SourceTensors, store: MergedLayers, number: int
) -> dict[str, Any]:
    """Merge one layer into the store; nothing of it stays in memory but the record."""
    parts, constraints = LayerTensors(finder, layer), find_folding_constraints(finder, layer)
    tensors: Tensors = {name: read(name) for name in parts.names}
    source = parts.cut(tensors)
    order = (
        order_heads(source, plan.groups, constraints, None)
        if plan.merge_method.reorders_heads
        else np.arange(source.groups)
    )
    source = ordered(source, order)
    assert plan.merge_method.folding is not None
    merged = merge_layer(source, plan.groups, plan.merge_method.folding, constraints, None)
    keys, values = fitted_errors(source, merged, constraints, None)
    del source
    record = {"module": layer.module, "keys": keys, "values": values} | noted(order)
    store.write(number, parts.join(merged, tensors, plan.groups), record)
    return record


def merged_plan(plan: Plan, store: MergedLayers) -> Plan:
    """The plan with every changed tensor read from the store instead of the source. The store holds tensors in the
    source's shapes, in which all heads of a group are equal, and the writer keeps the first of each.

    Args:
        plan: whose layers are all in the store.
        store: of merged layers.
    """
    extra = store.shards(len(plan.layers))
    first = len(plan.checkpoint.shards)
    moved: dict[tuple[int, int], tuple[int, int, int]] = {}  # shard, start -> shard, start, bytes
    places = {name: (number, entry) for number, name, entry in plan.checkpoint.tensors()}
    for number, shard in enumerate(extra, first):
        for name, entry in shard.header.tensors.items():
            old_number, old = places[name]
            moved[old_number, old.start] = number, entry.start, old.nbytes
    names = {name for shard in extra for name in shard.header.tensors}
    spans = _Spans(moved)

    def from_store(tensor: OutputTensor) -> OutputTensor:
        pieces = tuple(replace(piece, ranges=tuple(map(spans.move, piece.ranges))) for piece in tensor.pieces)
        return replace(tensor, pieces=pieces)

    def rewritten(shard: OutputShard) -> OutputShard:
        source = plan.checkpoint.shards[shard.whole_copy_of].header.tensors if shard.whole_copy_of is not None else {}
        whole = None if not names.isdisjoint(source) else shard.whole_copy_of
        return replace(shard, tensors=tuple(map(from_store, shard.tensors)), whole_copy_of=whole)

    checkpoint = replace(plan.checkpoint, shards=(*plan.checkpoint.shards, *extra))
    return replace(plan, checkpoint=checkpoint, shards=tuple(map(rewritten, plan.shards)))


class _Spans:
    """Sends byte ranges of the source's tensors to where their replacements lie."""

    def __init__(self, moved: dict[tuple[int, int], tuple[int, int, int]]) -> None:
        self._moved = moved
        self._starts: dict[int, Any] = {}
        for number in {number for number, _ in moved}:
            self._starts[number] = np.array(sorted(start for shard, start in moved if shard == number))

    def move(self, place: tuple[int, int]) -> tuple[int, int]:
        number, start = place
        if number in self._starts:
            index = int(np.searchsorted(self._starts[number], start, "right")) - 1
            if index >= 0:
                old = int(self._starts[number][index])
                target, new, nbytes = self._moved[number, old]
                if start < old + nbytes:
                    return target, new + start - old
        return place
