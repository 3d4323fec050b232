"""Which file of the result each tensor belongs to."""

from collections.abc import Iterator, Set

from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.conversion.plan.model import OutputFile


def keep_files(checkpoint: Checkpoint, dropped: Set[str]) -> Iterator[OutputFile]:
    """A file of the result for each of the source's, of the same name, without the tensors that the result has no more; none for
    a file of which nothing is left.
    """
    is_stored = checkpoint.weights_format == "safetensors" and checkpoint.rewritten_from is None
    for number, shard in enumerate(checkpoint.shards):
        names = [name for name in shard.tensors if name not in dropped]
        if names:
            copied = number if is_stored and len(names) == len(shard.tensors) else None
            yield OutputFile(safetensors_name(shard.file), names, shard.metadata, copied)


def safetensors_name(file: str) -> str:
    """The name of the safetensors file that has the tensors of a weight file."""
    if not file.endswith(".bin"):
        return file
    return file.replace("pytorch_model", "model", 1).removesuffix(".bin") + ".safetensors"
