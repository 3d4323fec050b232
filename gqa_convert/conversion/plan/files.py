"""Which file of the result each tensor belongs to."""

from collections.abc import Collection, Iterator

from gqa_convert.checkpoint.formats import SAFETENSORS_SINGLE
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.conversion.plan.model import OutputFile, Plan


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
        copied = checkpoint.stored.weights_format == "safetensors" and not checkpoint.recipes and not changes
        yield OutputFile(safetensors_name(shard.file), names, shard.header.metadata, number if copied else None)


def safetensors_name(file: str) -> str:
    """The name of the safetensors file that has the tensors of a weight file."""
    if not file.endswith(".bin"):
        return file
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
    found = []
    for number, names in enumerate(runs, 1):
        file = f"model-{number:05d}-of-{len(runs):05d}.safetensors" if len(runs) > 1 else SAFETENSORS_SINGLE
        found.append(OutputFile(file, names, {}))
    return found
