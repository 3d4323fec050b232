"""Which file of the result each tensor belongs to."""

from collections.abc import Collection, Iterator, Set

from gqa_convert.checkpoint.formats import SAFETENSORS_SINGLE
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.conversion.plan.model import OutputFile, Plan


def keep_files(checkpoint: Checkpoint, dropped: Set[str]) -> Iterator[OutputFile]:
    """A file of the result for each of the source's, of the same name, without the tensors that the result has no more; none for
    a file of which nothing is left.
    """
    is_stored = checkpoint.weights_format == "safetensors" and checkpoint.rewritten_from is None
    for number, shard in enumerate(checkpoint.shards):
        names: Collection[str] = shard.header.tensors.keys()
        is_whole = dropped.isdisjoint(names)
        if not is_whole:
            names = [name for name in names if name not in dropped]
        if names:
            copied = number if is_stored and is_whole else None
            yield OutputFile(safetensors_name(shard.file), names, shard.header.metadata, copied)


def safetensors_name(file: str) -> str:
    """The name of the safetensors file that has the tensors of a weight file."""
    if not file.endswith(".bin"):
        return file
    return file.replace("pytorch_model", "model", 1).removesuffix(".bin") + ".safetensors"


def divide_files(plan: Plan, limit: int) -> list[OutputFile]:
    """Files of at most `limit` bytes of tensors; a larger tensor has a file to itself."""
    runs: list[list[str]] = [[]]
    filled = 0
    for name, entry in plan.all_tensors():
        if runs[-1] and filled + entry.nbytes > limit:
            runs.append([])
            filled = 0
        runs[-1].append(name)
        filled += entry.nbytes
    found = []
    for number, names in enumerate(runs, 1):
        file = f"model-{number:05d}-of-{len(runs):05d}.safetensors" if len(runs) > 1 else SAFETENSORS_SINGLE
        found.append(OutputFile(file, names, {}))
    return found
