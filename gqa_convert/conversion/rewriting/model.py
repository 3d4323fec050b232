"""What a rewriting consists of."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gqa_convert.checkpoint.headers import DTYPE_BITS, Header, TensorEntry, build_header
from gqa_convert.checkpoint.source import Checkpoint, Shard
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.conversion.rewriting.arrays import Array


@dataclass(frozen=True, slots=True)
class RewrittenTensor:
    """A tensor of the rewritten source."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: int
    """The number of the source's file in whose place it is written."""
    sources: tuple[str, ...] = ()
    """The tensors of the source that it is computed from."""
    compute: Callable[..., Array] | None = None
    """Makes the array, in `dtype` and `shape`, from the sources' arrays; None if it is the bytes of the one source."""

    @property
    def nbytes(self) -> int:
        count = DTYPE_BITS[self.dtype] // 8
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewriting:
    """A source in another form, planned from its headers."""

    source: Checkpoint
    config: JsonObject
    tensors: tuple[RewrittenTensor, ...]
    carried: tuple[str, ...]
    """Sidecar files of the source that are copied."""
    result_dtypes: Mapping[str, str] = field(default_factory=dict)
    """The source's types of the tensors that are held in a wider one, since they are multiplied by another tensor."""
    special_tokens: tuple[str, ...] = ()
    """As in `StockForm`."""
    notes: tuple[str, ...] = ()
    """Sentences on what differs from the source."""

    @property
    def headers(self) -> Checkpoint:
        """What the rewritten folder will hold. Its `folder` is the source's, where the sidecar files lie already."""
        shards = []
        for number, shard in enumerate(self.source.shards):
            tensors = self.tensors_of(number)
            if tensors:
                shards.append(_header(_file_name(shard.file), tensors, shard.header.metadata))
        return replace(
            self.source,
            config=self.config,
            weights_format="safetensors",
            shards=tuple(shards),
            carried=self.carried,
            result_dtypes=self.result_dtypes,
            rewritten_from=self.source,
        )

    def tensors_of(self, number: int) -> list[RewrittenTensor]:
        """The tensors in the place of a file of the source."""
        return [tensor for tensor in self.tensors if tensor.shard == number]


def _file_name(file: str) -> str:
    if file.endswith(".safetensors"):
        return file
    return file.replace("pytorch_model", "model", 1).removesuffix(".bin") + ".safetensors"


def _header(file: str, tensors: Sequence[RewrittenTensor], metadata: Mapping[str, str]) -> Shard:
    """A file of the rewritten source, as its header will describe it."""
    metadata = {"format": "pt"} | dict(metadata)
    described = [(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes) for tensor in tensors]
    start = end = len(build_header(described, metadata))
    entries = {}
    for name, dtype, shape, nbytes in described:
        entries[name] = TensorEntry(dtype, shape, end, nbytes)
        end += nbytes
    return Shard(file, end, Header(entries, metadata, start))
