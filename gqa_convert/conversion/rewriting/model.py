"""What a rewriting consists of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from gqa_convert.checkpoint.headers import LENGTH_BYTES, build_header, parse_header
from gqa_convert.checkpoint.source import Checkpoint, Shard
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.conversion.plan.files import safetensors_name
from gqa_convert.conversion.plan.model import DescribedTensor
from gqa_convert.conversion.rewriting.arrays import Array

Compute = Callable[..., Array]
"""One of `arrays`: makes an array from its type and the arrays of the source."""


@dataclass(frozen=True, slots=True)
class RewrittenTensor(DescribedTensor):
    """A tensor of the rewritten source."""

    shard: int
    """The number of the source's file in whose place it is written."""
    sources: tuple[str, ...]
    """The tensors of the source that it is computed from."""
    compute: Compute | None = None
    """Makes the array; None if it is the bytes of the one source."""


@dataclass(frozen=True, slots=True)
class RewrittenFile:
    """A weight file of the rewritten source."""

    name: str
    header: bytes
    tensors: tuple[RewrittenTensor, ...]
    """In the order of their bytes, which follow the header."""

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


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
    def files(self) -> tuple[RewrittenFile, ...]:
        """The weight files: one for each of the source's that still has tensors."""
        found = []
        for number, shard in enumerate(self.source.shards):
            tensors = tuple(tensor for tensor in self.tensors if tensor.shard == number)
            if tensors:
                described = [tensor.described for tensor in tensors]
                header = build_header(described, {"format": "pt"} | dict(shard.header.metadata))
                found.append(RewrittenFile(safetensors_name(shard.file), header, tensors))
        return tuple(found)

    @property
    def headers(self) -> Checkpoint:
        """What the rewritten folder will hold. Its `folder` is the source's, where the sidecar files lie already."""
        shards = []
        for file in self.files:
            header = parse_header(file.header[LENGTH_BYTES:], file.nbytes, file.name)
            shards.append(Shard(file.name, file.nbytes, header))
        return replace(
            self.source,
            config=self.config,
            weights_format="safetensors",
            shards=tuple(shards),
            carried=self.carried,
            result_dtypes=self.result_dtypes,
            rewritten_from=self.source,
        )
