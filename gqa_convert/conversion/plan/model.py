"""What a plan consists of."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain

from gqa_convert.checkpoint.headers import ITEM_BYTES, TensorEntry
from gqa_convert.checkpoint.provenance import BeforeAfter
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.families.context_length import HIDDEN_SIZE_KEYS, stated_count, window_of
from gqa_convert.families.engines import computes_otherwise
from gqa_convert.families.geometry import AttentionKind, AttentionLayer
from gqa_convert.families.layouts import Section
from gqa_convert.families.records import record_of
from gqa_convert.families.table import Family, Modeling
from gqa_convert.merging.absorption_limits import AbsorptionLimits
from gqa_convert.merging.methods import COPY, METHODS, REPEAT, MergeMethod
from gqa_convert.runtime.json_objects import JsonObject

_ENTRY_BYTES = 120
"""Of a tensor in a file's header beside its name, at most."""
_SMALL_FILES_BYTES = 65536
"""Of the files that a conversion writes beside the weights and the copied files, at most."""
_CACHES: Mapping[str, AttentionKind] = {
    "kv_bytes_per_token": "decoder",
    "cross_kv_bytes_per_encoder_token": "cross",
}


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A weight file of the result.

    Tensors are named here and described by `Plan.tensors`: a description of each of a hundred
    thousand experts would take more memory than the headers.

    Attributes:
        names: of the tensors, in the order of their bytes.
        shard: the number of the source's file that has these tensors and no others, in the form in
            which they are written.
    """

    file: str
    names: Collection[str]
    metadata: Mapping[str, str]
    shard: int | None = None


@dataclass(frozen=True, slots=True)
class TensorChange:
    """A tensor of the result whose K/V heads change in number, or could, or that absorbs maps.

    Attributes:
        before: the shape in the source; where each head has a tensor of its own, that of the joined
            ones with heads first.
        entry: its type and shape in the result.
        method: the method that merges its heads, or whose maps it absorbs; `repeat`; or `copy`.
            Heads whose maps nothing can absorb are averaged under any method, and a warning says
            so.
        sources: the source's tensors with its K/V heads, joined along their first axis; more than
            one where each head has a tensor of its own, and none where it only absorbs maps.
        sections: where heads lie in them.
        kv_heads: heads of each section of the output whose heads are merged.
        transposed: whether heads lie along the second axis (Conv1D).
    """

    name: str
    before: tuple[int, ...]
    entry: TensorEntry
    method: str
    sources: tuple[str, ...] = ()
    sections: tuple[Section, ...] = ()
    kv_heads: int = 0
    transposed: bool = False

    def as_json(self) -> JsonObject:
        """The change as plain data."""
        return {
            "name": self.name,
            "before": list(self.before),
            "after": list(self.entry.shape),
            "dtype": self.entry.dtype,
            "method": self.method,
        }


@dataclass(frozen=True)
class Plan:
    """What a conversion will do.

    Attributes:
        modeling: the modelling file that travels with the result; None where stock classes load it.
        layer_kv_heads: N of each layer, by its module, in the order of the layers' numbers.
        limits: what may be absorbed in each layer, by its module; empty for methods that do not
            merge whole layers.
        source_kv_heads: where the source's layers differ, of the one with the most.
        changes: in the order of the layers' numbers.
        regrouped: by name, the tensors of the result whose heads change in number.
        config: the result's config.json.
    """

    checkpoint: Checkpoint
    family: Family
    modeling: Modeling | None
    layers: tuple[AttentionLayer, ...]
    layer_kv_heads: Mapping[str, int]
    limits: Mapping[str, AbsorptionLimits]
    method: str
    heads: int
    source_kv_heads: int
    changes: tuple[TensorChange, ...]
    regrouped: Mapping[str, TensorChange]
    files: tuple[OutputFile, ...]
    config: JsonObject
    warnings: tuple[str, ...]

    def tensors(self, file: OutputFile) -> Iterator[tuple[str, TensorEntry]]:
        """The names, types and shapes of the tensors of a file of the result, in the order of
        their bytes.
        """
        entries, dtypes = self.checkpoint.entries, self.checkpoint.result_dtypes
        for name in file.names:
            if name in self.regrouped:
                yield name, self.regrouped[name].entry
            elif name in dtypes:
                yield name, TensorEntry(dtypes[name], entries[name].shape)
            else:
                yield name, entries[name]

    def all_tensors(self) -> Iterator[tuple[str, TensorEntry]]:
        """The same of all files."""
        return chain.from_iterable(map(self.tensors, self.files))

    @property
    def stated_kv_heads(self) -> int | list[int]:
        """The N of all layers; where they differ, that of each layer in the order of the layers'
        numbers.
        """
        counts = list(self.layer_kv_heads.values())
        return counts[0] if len(set(counts)) == 1 else counts

    @property
    def merged_layers(self) -> tuple[tuple[AttentionLayer, int], ...]:
        """The layers whose K/V heads become fewer, each with its N."""
        pairs = [(layer, self.layer_kv_heads[layer.module]) for layer in self.layers]
        return tuple((layer, kv_heads) for layer, kv_heads in pairs if kv_heads < layer.kv_heads)

    @property
    def merge_method(self) -> MergeMethod:
        """The method that applies: `copy` where no layer's count changes, `repeat` above it,
        else the method asked for.
        """
        if self.merged_layers:
            return METHODS[self.method]
        return REPEAT if self.regrouped else COPY

    @property
    def rewritten_from(self) -> str | None:
        """The model type of a source that is converted in another form; None for any other."""
        source = self.checkpoint.rewritten_from
        return None if source is None else str(source.config["model_type"])

    @property
    def route(self) -> str:
        """What loads the result: stock classes (`native`), its modelling file (`own file`), or
        the source's own code.
        """
        if self.modeling:
            return "own file"
        return "native" if self.family.native or self.family.modeling else "checkpoint's own code"

    @property
    def loads_in(self) -> frozenset[str]:
        """Engines that have loaded a result of this kind without custom code."""
        if self.modeling:
            engines = frozenset(record_of(self.config).run_in)
        else:
            engines = frozenset({"transformers"}) if self.family.modeling else self.family.engines
        return frozenset(
            engine for engine in engines if not computes_otherwise(engine, self.config)
        )

    @property
    def listed_in(self) -> frozenset[str]:
        """Further software whose list of architectures has the result's type, which was not seen
        to load it.
        """
        return frozenset(record_of(self.config).listed_in)

    @property
    def hidden_size(self) -> int:
        """As the config has it, else the width of the first layer's queries."""
        layer = self.layers[0]
        stated = stated_count(self.checkpoint.config, HIDDEN_SIZE_KEYS)
        return stated or layer.heads * layer.key_head_dim

    def attention_numbers(self, layer: AttentionLayer, kv_heads: int) -> int:
        """How many numbers the projections of a layer have, with so many K/V heads."""
        rows = (layer.heads + kv_heads) * (layer.key_head_dim + layer.value_head_dim)
        return rows * self.hidden_size

    @property
    def weight_bytes_after(self) -> int:
        return sum(entry.nbytes for _, entry in self.all_tensors())

    @property
    def parameters_before(self) -> int:
        return sum(entry.elements for entry in self.checkpoint.entries.values())

    @property
    def parameters_after(self) -> int:
        return sum(entry.elements for _, entry in self.all_tensors())

    @property
    def disk_bytes(self) -> int:
        """What the result takes on disk, headers and copied files included, to within a few KiB."""
        headers = sum(len(name) + _ENTRY_BYTES for file in self.files for name in file.names)
        copied = sum(self.checkpoint.sizes[name] for name in self.checkpoint.carried)
        return self.weight_bytes_after + headers + copied + _SMALL_FILES_BYTES

    def kv_cache_bytes(
        self, attention_kind: AttentionKind = "decoder", tokens: int = 1
    ) -> BeforeAfter:
        """What the keys and values of all attention layers of a kind take, in the type of the
        projections.

        Args:
            attention_kind: `decoder` for a text, `cross` for an encoder's output.
            tokens: of the text. A layer with a sliding window holds no more than that.
        """
        before = after = 0
        for layer in self.layers:
            if layer.attention_kind == attention_kind:
                held = min(tokens, window_of(self.checkpoint.config, layer.number) or tokens)
                head_bytes = (
                    (layer.key_head_dim + layer.value_head_dim) * ITEM_BYTES[layer.dtype] * held
                )
                before += layer.kv_heads * head_bytes
                after += self.layer_kv_heads[layer.module] * head_bytes
        return BeforeAfter(before, after)

    def cache_bytes(self) -> dict[str, BeforeAfter]:
        """What one token takes of each cache that there is."""
        sizes = {key: self.kv_cache_bytes(kind) for key, kind in _CACHES.items()}
        return {key: both for key, both in sizes.items() if both.before}

    def summary(self) -> JsonObject:
        """The plan as plain data for `--json`."""
        return {
            "source": self.checkpoint.source_id,
            "revision": self.checkpoint.revision,
            "rewritten_from": self.rewritten_from,
            "model_type": self.family.model_type,
            "weights_format": self.checkpoint.weights_format,
            "heads": self.heads,
            "source_kv_heads": self.source_kv_heads,
            "kv_heads": self.stated_kv_heads,
            "method": self.merge_method.name,
            "attention_layers": len(self.layers),
            "changes": [change.as_json() for change in self.changes],
            "parameters": {"before": self.parameters_before, "after": self.parameters_after},
            "weight_bytes": {
                "before": self.checkpoint.weight_bytes,
                "after": self.weight_bytes_after,
            },
            **{key: asdict(both) for key, both in self.cache_bytes().items()},
            "disk_bytes": self.disk_bytes,
            "route": self.route,
            "result_model_type": self.config["model_type"],
            "modeling_file": f"{self.modeling.file}.py" if self.modeling else None,
            "loads_in": sorted(self.loads_in),
            "listed_in": sorted(self.listed_in),
            "left_behind": list(self.checkpoint.left_behind),
            "warnings": list(self.warnings),
        }
