"""Which bytes of the source every output tensor is made of."""

from collections.abc import Iterable, Iterator

from gqa_convert.checkpoint.headers import TensorEntry
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.conversion.plan.model import MostlyCopied, OutputShard, OutputTensor, Piece, TensorChange, copied
from gqa_convert.conversion.translation.description import TranslatedTensor
from gqa_convert.conversion.translation.tensors import translate_tensors
from gqa_convert.errors import GroupsError
from gqa_convert.families.geometry import AttentionFinder, AttentionLayer
from gqa_convert.families.layouts import Role, Section, regrouped
from gqa_convert.families.target_architectures import TargetArchitecture
from gqa_convert.merging.methods import COPY, REPEAT, MergeMethod, Pooling


def plan_tensors(
    checkpoint: Checkpoint, finder: AttentionFinder, counts: tuple[int, ...], method: MergeMethod
) -> tuple[list[OutputShard], list[TensorChange]]:
    """Every output tensor in the order of its source, and the list of those that change.

    Args:
        checkpoint: the source.
        finder: of its attention.
        counts: N of each of the finder's layers.
        method: that merges.
    """
    attention = {name for layer in finder.layers for name, _ in finder.sections(layer)}
    attention |= {name for layer in finder.layers for names in finder.head_lists(layer) for name in names}
    source_tensors = {name: (number, entry) for number, name, entry in checkpoint.tensors() if name in attention}
    changed: set[str] = set()
    planned: dict[str, OutputTensor | None] = {}
    changes: list[TensorChange] = []
    for layer, groups in zip(finder.layers, counts, strict=True):
        merged_first = method.merges_layers and groups < layer.kv_heads
        for name, cut in finder.sections(layer):
            number, entry = source_tensors[name]
            if groups == layer.kv_heads:
                output = copied(name, number, entry)
            elif merged_first:
                output = _unmerged(name, entry, cut, groups, transposed=finder.family.transposed)
                changed.add(name)
            else:
                output = _regrouped(
                    name,
                    number,
                    entry,
                    cut,
                    groups,
                    method,
                    transposed=finder.family.transposed and len(entry.shape) == 2,
                )
                changed.add(name)
            planned[name] = output
            roles = tuple(section.role for section in cut if section.merged)
            changes.append(_change(name, layer, roles, entry, output.shape, groups, method))
        for names in finder.head_lists(layer):
            blocks = [(source_tensors[name][0], source_tensors[name][1].start) for name in names]
            entry = source_tensors[names[0]][1]
            pieces = _regrouped_blocks(blocks, entry.nbytes, groups, method.norm_pooling)
            changed.update(names if groups != layer.kv_heads else ())
            planned |= dict.fromkeys(names)
            for name, piece in zip(names, pieces, strict=False):
                planned[name] = OutputTensor(name, entry.dtype, entry.shape, () if merged_first else (piece,))
            stem = names[0].rsplit(".0.", 1)[0]
            changes.append(
                _change(
                    stem,
                    layer,
                    ("key_norm",),
                    entry,
                    (groups, *entry.shape),
                    groups,
                    method,
                    before=(len(names), *entry.shape),
                )
            )
            if groups > len(names):
                raise GroupsError(
                    f"{stem} has one tensor per K/V head, so that heads can't be repeated here: choose at most {len(names)} groups"
                )
    shards = []
    for number, shard in enumerate(checkpoint.shards):
        tensors = MostlyCopied(number, shard.header.tensors, planned)
        untouched = changed.isdisjoint(shard.header.tensors)
        shards.append(OutputShard(shard.file, tensors, dict(shard.header.metadata), number if untouched else None))
    return shards, changes


def plan_translation(
    checkpoint: Checkpoint,
    finder: AttentionFinder,
    target_architecture: TargetArchitecture,
    groups: int,
    method: MergeMethod,
) -> tuple[list[OutputShard], list[TensorChange]]:
    """Every tensor of the target architecture, in the file of the source tensor that it comes from, and those whose
    heads become fewer.
    """
    from gqa_convert.merging.attention_heads import LayerLayout  # imports numpy

    source_tensors = {name: (number, entry) for number, name, entry in checkpoint.tensors()}
    merged_layers = frozenset(
        name
        for layer in finder.layers
        if method.merges_layers and groups < layer.kv_heads
        for name in LayerLayout(finder, layer).names
    )
    translation = translate_tensors(finder.entries, checkpoint.config, target_architecture, groups, method)
    tensors: list[list[OutputTensor]] = [[] for _ in checkpoint.shards]
    changes = []
    for tensor in translation.tensors:
        if tensor.merged:
            merged, module = tensor.merged, tensor.name.rsplit(".", 2)[0]
            changes.append(
                TensorChange(
                    tensor.name, module, merged.roles, tensor.dtype, merged.before, merged.after, merged.method
                )
            )
        tensors[source_tensors[tensor.place][0]].append(_translated(tensor, source_tensors, merged_layers))
    files = [shard for shard in checkpoint.shards if tensors[checkpoint.shards.index(shard)]]
    return [
        OutputShard(shard.file, tuple(tensors[checkpoint.shards.index(shard)]), dict(shard.header.metadata))
        for shard in files
    ], changes


def _translated(
    tensor: TranslatedTensor, source_tensors: dict[str, tuple[int, TensorEntry]], merged_layers: frozenset[str]
) -> OutputTensor:
    """Rows that are only copied become ordinary pieces, unless they belong to one of the `merged_layers`, whose tensors
    do not exist yet.
    """
    if tensor.copied_ranges is None or any(name in merged_layers for name, _, _ in tensor.copied_ranges):
        return OutputTensor(tensor.name, tensor.dtype, tensor.shape, (), translated=tensor)
    pieces = []
    for name, first, rows in tensor.copied_ranges:
        number, entry = source_tensors[name]
        row_bytes = entry.nbytes // entry.shape[0]
        pieces.append(Piece(((number, entry.start + first * row_bytes),), rows * row_bytes))
    return OutputTensor(tensor.name, tensor.dtype, tensor.shape, tuple(pieces))


def _change(
    name: str,
    layer: AttentionLayer,
    roles: tuple[Role, ...],
    entry: TensorEntry,
    after: tuple[int, ...],
    groups: int,
    method: MergeMethod,
    before: tuple[int, ...] | None = None,
) -> TensorChange:
    used: str = method.norm_pooling if roles == ("key_norm",) else method.name
    if groups >= layer.kv_heads:
        used = (COPY if groups == layer.kv_heads else REPEAT).name
    return TensorChange(name, layer.module, roles, entry.dtype, before or entry.shape, after, used)


def _unmerged(
    name: str, entry: TensorEntry, cut: tuple[Section, ...], groups: int, *, transposed: bool
) -> OutputTensor:
    """An output tensor without pieces, for a layer that is merged before the writer runs."""
    axis = 1 if transposed and len(entry.shape) == 2 else 0
    length = sum(section.rows for section in regrouped(cut, groups))
    return OutputTensor(name, entry.dtype, (*entry.shape[:axis], length, *entry.shape[axis + 1 :]), ())


def _regrouped(
    name: str,
    shard: int,
    entry: TensorEntry,
    cut: tuple[Section, ...],
    groups: int,
    method: MergeMethod,
    *,
    transposed: bool,
) -> OutputTensor:
    """The output tensor whose merged sections hold `groups` heads instead of the source's count, section behind
    section.
    """
    outer, axis = (entry.shape[0], 1) if transposed else (1, 0)
    unit = entry.nbytes // outer // entry.shape[axis]
    pieces: list[Piece] = []
    length = 0
    for section in cut:
        nbytes = section.head_rows * unit
        blocks = [(shard, entry.start + start * unit) for start in section.starts]
        if section.merged:
            pooling = method.norm_pooling if section.role == "key_norm" else method.pooling
            pieces += _regrouped_blocks(blocks, nbytes, groups, pooling)
            length += groups * section.head_rows
        else:
            pieces += _joined(blocks, nbytes)
            length += section.rows
    shape = (*entry.shape[:axis], length, *entry.shape[axis + 1 :])
    return OutputTensor(name, entry.dtype, shape, tuple(pieces), outer, entry.nbytes // outer if transposed else 0)


def _joined(blocks: list[tuple[int, int]], nbytes: int) -> Iterator[Piece]:
    """Copies of blocks of a shard; neighbours travel together."""
    shard, begin = blocks[0]
    for (_, block), following in zip(blocks, [start for _, start in blocks[1:]] + [-1], strict=True):
        if following != block + nbytes:
            yield Piece(((shard, begin),), block + nbytes - begin)
            begin = following


def _regrouped_blocks(blocks: list[tuple[int, int]], nbytes: int, groups: int, pooling: Pooling | None) -> list[Piece]:
    """One piece per group: contiguous heads share a group, as every native implementation has it."""
    if groups >= len(blocks):
        copies = groups // len(blocks)
        return [Piece((block,), nbytes) for block in blocks for _ in range(copies)]
    size = len(blocks) // groups
    return [Piece(tuple(blocks[first : first + size]), nbytes, pooling) for first in range(0, len(blocks), size)]


def safetensors_name(file: str) -> str:
    return file.replace("pytorch_model", "model", 1).removesuffix(".bin") + ".safetensors"


def reshard(shards: Iterable[OutputShard], limit: int) -> list[OutputShard]:
    """The same tensors in files of at most `limit` bytes of tensors; a larger tensor has a file to itself."""
    runs: list[list[OutputTensor]] = [[]]
    filled = 0
    metadata: dict[str, str] = {}
    for shard in shards:
        metadata |= shard.metadata
        for tensor in shard.tensors:
            if runs[-1] and filled + tensor.nbytes > limit:
                runs.append([])
                filled = 0
            runs[-1].append(tensor)
            filled += tensor.nbytes
    if len(runs) == 1:
        return [OutputShard("model.safetensors", tuple(runs[0]), metadata)]
    count = len(runs)
    return [
        OutputShard(f"model-{number:05d}-of-{count:05d}.safetensors", tuple(run), metadata)
        for number, run in enumerate(runs, 1)
    ]
