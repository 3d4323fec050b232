"""Lets the writer read merged layers."""

from dataclasses import replace

from gqa_convert.checkpoint.headers import TensorEntry
from gqa_convert.conversion.fit.merged_layers import MergedLayers
from gqa_convert.conversion.plan import OutputShard, OutputTensor, Piece, Plan


def merged_plan(plan: Plan, store: MergedLayers) -> Plan:
    """The plan in which the tensors of merged layers are copied from the store.

    The store's files are appended to the source's. A tensor of the result that has the name of a stored one is a copy
    of it. The tensors of a translation are described by the names of those that they read, which from now on are the
    stored ones: of two tensors with one name, the later counts.

    Args:
        plan: whose merged layers are all in the store.
        store: of merged layers.
    """
    stored_files = store.shards(len(plan.merged_layers))
    checkpoint = replace(plan.checkpoint, shards=(*plan.checkpoint.shards, *stored_files))
    if plan.target_architecture:
        return replace(plan, checkpoint=checkpoint)
    stored = {
        name: (number, entry)
        for number, shard in enumerate(stored_files, len(plan.checkpoint.shards))
        for name, entry in shard.header.tensors.items()
    }
    return replace(plan, checkpoint=checkpoint, shards=tuple(_with_stored(shard, stored) for shard in plan.shards))


def _with_stored(shard: OutputShard, stored: dict[str, tuple[int, TensorEntry]]) -> OutputShard:
    if stored.keys().isdisjoint(tensor.name for tensor in shard.tensors):
        return shard
    tensors = tuple(
        _copied(tensor, *stored[tensor.name]) if tensor.name in stored else tensor for tensor in shard.tensors
    )
    return replace(shard, tensors=tensors, whole_copy_of=None)


def _copied(tensor: OutputTensor, number: int, entry: TensorEntry) -> OutputTensor:
    return OutputTensor(tensor.name, entry.dtype, entry.shape, (Piece(((number, entry.start),), entry.nbytes),))
