"""What a plan consists of."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Final

from gqa_convert.checkpoint.headers import TensorEntry
from gqa_convert.checkpoint.item_bytes import ITEM_BYTES
from gqa_convert.checkpoint.provenance import BeforeAfter
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.conversion.translation.description import TranslatedTensor
from gqa_convert.families.engines import ignores_scaled_positions, listed_in, run_in
from gqa_convert.families.geometry import AttentionKind, AttentionLayer
from gqa_convert.families.layouts import Role
from gqa_convert.families.table import Family, Modeling
from gqa_convert.families.target_architectures import TargetArchitecture
from gqa_convert.families.target_choice import engines_for
from gqa_convert.families.tensor_parallel import ParallelDegrees, parallel_degrees
from gqa_convert.families.windows import window_of
from gqa_convert.merging.methods import COPY, METHODS, REPEAT, MergeMethod, Pooling

_ENTRY_BYTES: Final = 120
"""Of a tensor in a file's header beside its name, at most."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of output bytes: copied from one source range, or merged from several of the same length.

    `ranges` holds (shard number, byte offset in that file); `pooling` is None for a copy.
    """

    ranges: tuple[tuple[int, int], ...]
    nbytes: int
    pooling: Pooling | None = None


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor of the result and the pieces whose bytes, one behind the other, are its own.

    Where heads lie along the last axis (Conv1D), the pieces are those of one row; each of the `rows` is made of them,
    and the ranges move on by `stride` bytes from one to the next. A tensor of a translation that takes arithmetic has
    no pieces, but its description; a tensor whose heads a method merges layer by layer has none until that is done.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    rows: int = 1
    stride: int = 0
    translated: TranslatedTensor | None = None
    unit_rows: bool = False
    """Each row of the one piece is divided by its length on the way."""

    @property
    def elements(self) -> int:
        return _count(self.shape)

    @property
    def nbytes(self) -> int:
        if self.translated:
            return self.translated.nbytes
        if not self.pieces:
            return self.elements * ITEM_BYTES[self.dtype]
        return self.rows * sum(piece.nbytes for piece in self.pieces)


def copied(name: str, shard: int, entry: TensorEntry) -> OutputTensor:
    """A tensor of the source as it is.

    Args:
        name: of the tensor.
        shard: the number of its file.
        entry: of the file's header.
    """
    return OutputTensor(name, entry.dtype, entry.shape, (Piece(((shard, entry.start),), entry.nbytes),))


class MostlyCopied(Sequence[OutputTensor]):
    """The tensors of one file of the source, most of them copied.

    Copies are made when they are looked at: five objects for each of a hundred thousand experts would take more memory
    than the headers.

    Args:
        shard: the number of the file.
        entries: of its header.
        planned: by name, the tensors that are no copies, and None for those that the result lacks; of any file.
    """

    def __init__(
        self, shard: int, entries: Mapping[str, TensorEntry], planned: Mapping[str, OutputTensor | None]
    ) -> None:
        self._shard, self._entries = shard, entries
        self._planned = {name: planned[name] for name in planned.keys() & entries.keys()}

    def __iter__(self) -> Iterator[OutputTensor]:
        planned, shard = self._planned, self._shard
        for name, entry in self._entries.items():
            tensor = planned[name] if name in planned else copied(name, shard, entry)
            if tensor is not None:
                yield tensor

    def __len__(self) -> int:
        return len(self._entries) - sum(tensor is None for tensor in self._planned.values())

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index] if index != 0 else next(iter(self))

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class TensorChange:
    """A tensor whose K/V heads change in number, or into which a method folds maps, with its shape before and after."""

    name: str
    module: str
    roles: tuple[Role, ...]
    dtype: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    method: str
    """The method that merges its heads, or whose maps are folded into it; `repeat`; or `copy`."""


@dataclass(frozen=True)
class OutputShard:
    """One output file."""

    file: str
    tensors: Sequence[OutputTensor]
    metadata: dict[str, str]
    whole_copy_of: int | None = None
    """The number of the source shard that this file equals byte for byte, if it does."""

    @property
    def nbytes(self) -> int:
        return self.totals.nbytes

    @cached_property
    def totals(self) -> "ShardTotals":
        """Sums over the tensors."""
        nbytes = elements = header_bytes = 0
        for tensor in self.tensors:
            nbytes += tensor.nbytes
            elements += tensor.elements
            header_bytes += len(tensor.name) + _ENTRY_BYTES
        return ShardTotals(nbytes, elements, header_bytes)


@dataclass(frozen=True, slots=True)
class ShardTotals:
    """Sums over the tensors of an output file."""

    nbytes: int
    elements: int
    header_bytes: int
    """About."""


@dataclass(frozen=True)
class Plan:
    """What a conversion will do."""

    checkpoint: Checkpoint
    family: Family
    modeling: Modeling | None
    """The modelling file that travels with the result; None where stock classes load it."""
    target_architecture: TargetArchitecture | None
    """The stock model type that the source is translated to; None where it keeps its own."""
    layer_groups: tuple[int, ...]
    """N of each of `layers`."""
    method: str
    seed: int
    heads: int
    source_kv_heads: int
    """Where the source's layers differ, of the one with the most."""
    layers: tuple[AttentionLayer, ...]
    changes: tuple[TensorChange, ...]
    shards: tuple[OutputShard, ...]
    config: JsonObject
    """The result's config.json."""
    warnings: tuple[str, ...]

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have the same N."""
        return len(set(self.layer_groups)) == 1

    @property
    def groups(self) -> int:
        """The N of all layers.

        Raises:
            ValueError: layers differ; their numbers are in `layer_groups`.
        """
        (groups,) = set(self.layer_groups)
        return groups

    @property
    def stated_groups(self) -> int | list[int]:
        """The N of all layers; where they differ, that of each layer in the order of the layers' numbers."""
        if self.is_uniform:
            return self.groups
        numbered = zip(self.layers, self.layer_groups, strict=True)
        return [groups for _, groups in sorted(numbered, key=lambda pair: pair[0].number)]

    @property
    def merged_layers(self) -> tuple[tuple[AttentionLayer, int], ...]:
        """The layers on which a method works that merges whole layers, each with its N. Where layers differ, those that
        keep their K/V heads are copied.
        """
        pairs = zip(self.layers, self.layer_groups, strict=True)
        every = self.is_uniform and not self.family.is_layerwise
        return tuple(pair for pair in pairs if every or pair[1] != pair[0].kv_heads)

    @property
    def effective_method(self) -> str:
        """The method that applies: `copy` where no layer's count changes, `repeat` above it, else the method asked for."""
        return self.merge_method.name

    @property
    def merge_method(self) -> MergeMethod:
        """The registry's record of the effective method."""
        methods = {change.method for change in self.changes} - {COPY.name}
        return COPY if not methods else REPEAT if methods == {REPEAT.name} else METHODS[self.method]

    @property
    def route(self) -> str:
        """What loads the result: stock classes of its own type (`native`) or of another that computes the same
        (`translated`), its modelling file (`own file`), or the source's own code."""
        if self.modeling:
            return "own file"
        if self.target_architecture:
            return "translated"
        return "native" if self.family.native or self.family.modeling else "checkpoint's own code"

    @property
    def loads_in(self) -> frozenset[str]:
        """Engines that have loaded a result of this kind without custom code."""
        if self.modeling:
            config = self.config
            return frozenset(
                each for each in run_in(config["model_type"]) if not ignores_scaled_positions(each, config)
            )
        if self.target_architecture:
            return engines_for(self.checkpoint.config, self.target_architecture)
        return frozenset({"transformers"}) if self.family.modeling else self.family.engines

    @property
    def listed_in(self) -> frozenset[str]:
        """Further software whose list of architectures has the result's type, which was not seen to load it."""
        return listed_in(self.config["model_type"])

    @property
    def weight_bytes_after(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    @property
    def parameters_before(self) -> int:
        return sum(entry.elements for _, _, entry in self.checkpoint.tensors())

    @property
    def parameters_after(self) -> int:
        return sum(shard.totals.elements for shard in self.shards)

    @property
    def disk_bytes(self) -> int:
        """What the result takes on disk, headers and carried files included, to within a few KiB."""
        headers = sum(shard.totals.header_bytes for shard in self.shards)
        return (
            self.weight_bytes_after
            + headers
            + sum(self.checkpoint.sizes[name] for name in self.checkpoint.carried)
            + 65536
        )

    def cache_bytes_per_token(self, after: bool, attention_kind: AttentionKind = "decoder") -> int:
        """K/V-cache bytes that one token takes over all attention layers of a place, in the type of the projections.

        A token of the text takes those of `decoder`, a token of an encoder's output those of `cross`.
        """
        return sum(
            (groups if after else layer.kv_heads)
            * (layer.key_head_dim + layer.value_head_dim)
            * ITEM_BYTES[layer.dtype]
            for layer, groups in zip(self.layers, self.layer_groups, strict=True)
            if layer.attention_kind == attention_kind
        )

    def cache_bytes(self) -> dict[str, BeforeAfter]:
        """The bytes before and after of each cache that there is."""
        attention_kinds: dict[str, AttentionKind] = {
            "kv_bytes_per_token": "decoder",
            "cross_kv_bytes_per_encoder_token": "cross",
        }
        sizes = {
            key: BeforeAfter(
                self.cache_bytes_per_token(False, attention_kind), self.cache_bytes_per_token(True, attention_kind)
            )
            for key, attention_kind in attention_kinds.items()
        }
        return {key: both for key, both in sizes.items() if both.before}

    def cache_bytes_at(self, tokens: int) -> BeforeAfter:
        """The K/V cache of a text of `tokens` tokens, in bytes: a layer with a sliding window holds no more than that."""
        before = after = 0
        for layer, groups in zip(self.layers, self.layer_groups, strict=True):
            if layer.attention_kind == "decoder":
                held = min(tokens, window_of(self.checkpoint.config, layer.number) or tokens)
                head_bytes = (layer.key_head_dim + layer.value_head_dim) * ITEM_BYTES[layer.dtype]
                before += layer.kv_heads * head_bytes * held
                after += groups * head_bytes * held
        return BeforeAfter(before, after)

    def tensor_parallel_degrees(self) -> ParallelDegrees:
        """Degrees of tensor parallelism that fit the K/V heads of every layer."""
        return parallel_degrees(self.heads, set(self.layer_groups), self.config["model_type"])

    def summary(self) -> JsonObject:
        """The plan as plain data for `--json`."""
        return {
            "source": self.checkpoint.source_id,
            "revision": self.checkpoint.revision,
            "model_type": self.family.model_type,
            "weights_format": self.checkpoint.weights_format,
            "heads": self.heads,
            "source_kv_heads": self.source_kv_heads,
            "groups": self.stated_groups,
            "method": self.effective_method,
            "attention_layers": len(self.layers),
            "changes": [
                {"name": c.name, "before": list(c.before), "after": list(c.after), "dtype": c.dtype, "method": c.method}
                for c in self.changes
            ],
            "parameters": {"before": self.parameters_before, "after": self.parameters_after},
            "weight_bytes": {"before": self.checkpoint.weight_bytes, "after": self.weight_bytes_after},
            **{key: asdict(both) for key, both in self.cache_bytes().items()},
            "disk_bytes": self.disk_bytes,
            "route": self.route,
            "result_model_type": self.config["model_type"],
            "modeling_file": f"{self.modeling.file}.py" if self.modeling else None,
            "loads_in": sorted(self.loads_in),
            "listed_in": sorted(self.listed_in),
            "tensor_parallel": self.tensor_parallel_degrees()._asdict(),
            "left_behind": list(self.checkpoint.left_behind),
            "warnings": list(self.warnings),
        }


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
