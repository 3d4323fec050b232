"""Which tensors the result has, which of them change, and which file each belongs to."""

from collections.abc import Collection, Iterator

from gqa_convert.checkpoint.formats import SAFETENSORS_SINGLE
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.conversion.plan.model import OutputFile, OutputTensor, Plan, Regrouping
from gqa_convert.errors import GroupsError
from gqa_convert.families.geometry import AttentionFinder, AttentionLayer
from gqa_convert.families.layouts import Section, regrouped, separate
from gqa_convert.merging.methods import MergeMethod

Shape = tuple[int, ...]


def shape_after(finder: AttentionFinder, name: str, sections: tuple[Section, ...], groups: int) -> Shape:
    """The shape of a tensor once its sections of K/V heads have `groups` heads."""
    shape = finder.entries[name].shape
    rows = sum(section.rows for section in regrouped(sections, groups))
    if finder.family.transposed and len(shape) == 2:
        return shape[0], rows
    return rows, *shape[1:]


def regrouped_tensors(
    finder: AttentionFinder, layer: AttentionLayer, groups: int, method: MergeMethod
) -> Iterator[OutputTensor]:
    """The tensors of a layer that hold K/V heads, with `groups` heads instead of the source's, in the source's types.

    Raises:
        GroupsError: heads would be repeated that have a tensor each.
    """
    for name, sections in finder.sections(layer):
        entry = finder.entries[name]
        is_norm = any(section.role == "key_norm" for section in sections)
        regrouping = Regrouping(
            sources=(name,),
            sections=sections,
            groups=groups,
            pooling=method.norm_pooling if is_norm else method.pooling,
            transposed=finder.family.transposed and len(entry.shape) == 2,
        )
        yield OutputTensor(name, entry.dtype, shape_after(finder, name, sections, groups), regrouping)
    for names in finder.head_lists(layer):
        if groups > len(names):
            raise GroupsError(
                f"{head_list_name(names)} has one tensor per K/V head, so that heads can't be repeated here: choose at "
                f"most {len(names)} groups"
            )
        entry = finder.entries[names[0]]
        size = len(names) // groups
        for group in range(groups):
            regrouping = Regrouping(
                sources=tuple(names[group * size : (group + 1) * size]),
                sections=separate("key_norm", size, entry.shape[0]),
                groups=1,
                pooling=method.norm_pooling,
            )
            yield OutputTensor(names[group], entry.dtype, entry.shape, regrouping)


def head_list_name(names: list[str]) -> str:
    """The name that the tensors of a list have in common."""
    return names[0].rsplit(".0.", 1)[0]


def keep_files(checkpoint: Checkpoint, touched: Collection[str], dropped: Collection[str]) -> Iterator[OutputFile]:
    """A file of the result for each of the source's, of the same name.

    Args:
        checkpoint: the source.
        touched: names of tensors that are not copied.
        dropped: those of them that the result has no more.
    """
    for number, shard in enumerate(checkpoint.shards):
        names: Collection[str] = shard.header.tensors.keys()
        changes = any(name in touched for name in names)
        if changes and dropped:
            names = [name for name in names if name not in dropped]
        if checkpoint.weights_format == "torch":
            yield OutputFile(safetensors_name(shard.file), names, shard.header.metadata)
        else:
            yield OutputFile(shard.file, names, shard.header.metadata, None if changes else number)


def safetensors_name(file: str) -> str:
    """The name of a safetensors file that has the tensors of a `.bin` file."""
    return file.replace("pytorch_model", "model", 1).removesuffix(".bin") + ".safetensors"


def divide_files(plan: Plan, limit: int) -> list[OutputFile]:
    """Files of at most `limit` bytes of tensors; a larger tensor has a file to itself."""
    runs: list[list[str]] = [[]]
    filled = 0
    for tensor in plan.all_tensors():
        if runs[-1] and filled + tensor.nbytes > limit:
            runs.append([])
            filled = 0
        runs[-1].append(tensor.name)
        filled += tensor.nbytes
    metadata: dict[str, str] = {}
    for file in plan.files:
        metadata |= file.metadata
    if len(runs) == 1:
        return [OutputFile(SAFETENSORS_SINGLE, runs[0], metadata)]
    return [
        OutputFile(f"model-{number:05d}-of-{len(runs):05d}.safetensors", names, metadata)
        for number, names in enumerate(runs, 1)
    ]
