"""What a rewriting consists of."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gqa_convert.checkpoint.headers import DTYPE_BITS, Header, TensorEntry, build_header
from gqa_convert.checkpoint.source import Checkpoint, Shard
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.conversion.plan.files import safetensors_name
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
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    @property
    def described(self) -> tuple[str, str, tuple[int, ...], int]:
        """As `build_header` takes it."""
        return self.name, self.dtype, self.shape, self.nbytes


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
        for number, tensors in self.tensors_by_shard().items():
            shard = self.source.shards[number]
            shards.append(_header(safetensors_name(shard.file), tensors, shard.header.metadata))
        return replace(
            self.source,
            config=self.config,
            weights_format="safetensors",
            shards=tuple(shards),
            carried=self.carried,
            result_dtypes=self.result_dtypes,
            rewritten_from=self.source,
        )

    def tensors_by_shard(self) -> dict[int, list[RewrittenTensor]]:
        """The tensors by the file of the source in whose place they are written, in the order of the files."""
        found: dict[int, list[RewrittenTensor]] = {}
        for tensor in sorted(self.tensors, key=lambda tensor: tensor.shard):
            found.setdefault(tensor.shard, []).append(tensor)
        return found


def _header(file: str, tensors: Sequence[RewrittenTensor], metadata: Mapping[str, str]) -> Shard:
    """A file of the rewritten source, as its header will describe it."""
    metadata = {"format": "pt"} | dict(metadata)
    start = end = len(build_header([tensor.described for tensor in tensors], metadata))
    entries = {}
    for tensor in tensors:
        entries[tensor.name] = TensorEntry(tensor.dtype, tensor.shape, end, tensor.nbytes)
        end += tensor.nbytes
    return Shard(file, end, Header(entries, metadata, start))
