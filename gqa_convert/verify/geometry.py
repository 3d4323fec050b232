"""Which tensors hold K/V heads and how many there are before and after, from the source's config and the tensors'
shapes.

The converter decides the same from the same files with code of its own; agreement of the two is part of the proof.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from gqa_convert.errors import ConfigError
from gqa_convert.families.table import Family
from gqa_convert.verify.checkpoint_reader import Weights
from gqa_convert.verify.layout import Run, alone, axis_of, fused
from gqa_convert.verify.report import Failure

AttentionKind = Literal["decoder", "cross", "encoder"]
"""Self-attention of a decoder, its attention to an encoder's output, or an encoder's self-attention."""

Route = Literal["native", "translated", "own file", "checkpoint's own code"]
"""What loads OUT: stock classes of SOURCE's type or of another, a modelling file of ours in OUT, or code that SOURCE
brings.
"""


@dataclass(frozen=True, slots=True)
class Counts:
    """Heads of every attention module of a place."""

    heads: int
    """Query heads."""
    before: int
    """K/V heads in SOURCE."""
    after: int
    """K/V heads in OUT."""

    @property
    def size(self) -> int:
        """K/V heads of SOURCE in a group; 0 when heads are repeated."""
        return self.before // self.after


@dataclass(frozen=True, slots=True)
class Cut:
    """A tensor with K/V heads: the place of its module, its heads in SOURCE, and the axis along which they lie."""

    attention_kind: AttentionKind
    runs: tuple[Run, ...]
    axis: int = 0


@dataclass
class Geometry:
    """The heads of a checkpoint and of its conversion. An encoder that is left alone is not in it."""

    counts: dict[AttentionKind, Counts]
    modules: dict[str, AttentionKind]
    """Attention modules, by the names of their tensors."""
    encoder: bool | None = False
    """Whether an encoder was converted; None if its tensors are the same either way."""
    cuts: dict[str, Cut] = field(default_factory=dict)
    lists: list[tuple[AttentionKind, list[str]]] = field(default_factory=list)
    """Runs of tensors, one per K/V head of SOURCE."""
    translated: bool = False
    """Whether OUT is of another stock type."""

    @property
    def heads(self) -> int:
        return self.counts["decoder"].heads

    @property
    def before(self) -> int:
        return self.counts["decoder"].before

    @property
    def after(self) -> int:
        return self.counts["decoder"].after

    @property
    def changed(self) -> bool:
        return any(counts.before != counts.after for counts in self.counts.values())

    def describe(self) -> str:
        """Heads and layers, in one line."""
        names = {"decoder": "layers", "cross": "layers of cross-attention", "encoder": "layers of the encoder"}
        layers = {
            attention_kind: sum(1 for one in self.modules.values() if one == attention_kind)
            for attention_kind in self.counts
        }
        text = f"{self.heads} query heads, {self.before} -> {self.after} K/V heads in "
        text += ", ".join(f"{layers[attention_kind]} {names[attention_kind]}" for attention_kind in self.counts)
        own = self.counts.get("encoder")
        return f"{text} ({own.before} -> {own.after} of {own.heads})" if own and own.before != self.before else text

    def dropped(self) -> set[str]:
        """Tensors that OUT must not have."""
        return {name for attention_kind, names in self.lists for name in names[self.counts[attention_kind].after :]}

    def route(self, family: Family) -> Route:
        """Heads of a type with a modelling file need it once their number differs from SOURCE's; a result of ours has
        it already.
        """
        if self.translated:
            return "translated"
        if family.modeling is None:
            return "native" if family.native else "checkpoint's own code"
        return "own file" if self.changed or family.is_converted else "native"


def config_value(config: dict[str, Any], dotted: str) -> Any:
    """The value at a dotted key, or None."""
    value: Any = config
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def attention_kind_of(name: str, family: Family) -> AttentionKind | None:
    """Where a tensor or parameter `module.projection.weight` of an attention module belongs; None for anything else."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        module = f".{'.'.join(parts[:end])}"
        kind = next((attention for attention in family.attention if module.endswith(f".{attention}")), None)
        if kind is not None:
            if family.encoder in parts[:end]:
                return "encoder"
            return "cross" if kind in family.cross_attention else "decoder"
    return None


def read_geometry(family: Family, config: dict[str, Any], source: Weights, out: Weights) -> Geometry:
    """The geometry of SOURCE, and OUT's counts from the shapes of a projection in the decoder and of one in the
    encoder.

    Args:
        family: of SOURCE.
        config: SOURCE's.
        source: its tensors.
        out: the tensors of OUT.

    Raises:
        ConfigError: SOURCE contradicts itself.
        Failure: OUT's count can't be told.
    """
    return _Reader(family, config, source, out).read()


class _Reader:
    """Reads a geometry."""

    def __init__(self, family: Family, config: dict[str, Any], source: Weights, out: Weights) -> None:
        self._family = family
        self._config = config
        self._source = source
        self._out = out

    def read(self) -> Geometry:
        family = self._family
        ending = f".{family.fused or family.value}.weight"
        attention_kinds = {
            name.removesuffix(ending): attention_kind
            for name in self._source.file_of
            if name.endswith(ending)
            and _is_module(name.removesuffix(ending), family)
            and (attention_kind := attention_kind_of(name, family))
        }
        heads = self._stated(family.heads_key)
        first = next(
            (module for module, attention_kind in attention_kinds.items() if attention_kind == "decoder"), None
        )
        if type(heads) is not int or heads < 1 or first is None:
            found = f"{len(attention_kinds)} attention modules of {heads!r} heads"
            raise ConfigError(f"{self._source.folder} is no {family.model_type} checkpoint: it has {found}")
        before = self._kv_heads(heads, first)
        after = self._count_in_out(first, heads, before)
        counts: dict[AttentionKind, Counts] = {
            "decoder": Counts(heads, before, after),
            "cross": Counts(heads, before, after),
        }
        encoder: bool | None = False
        inside = next(
            (module for module, attention_kind in attention_kinds.items() if attention_kind == "encoder"), None
        )
        if inside is not None:
            encoder = self._read_encoder(inside, counts, after)
        if not encoder:
            attention_kinds = {
                module: attention_kind
                for module, attention_kind in attention_kinds.items()
                if attention_kind != "encoder"
            }
            counts.pop("encoder", None)
        if "cross" not in attention_kinds.values():
            del counts["cross"]
        geometry = Geometry(counts, attention_kinds, encoder)
        for module, attention_kind in attention_kinds.items():
            self._add_module(geometry, module, attention_kind)
        return geometry

    def _read_encoder(self, module: str, counts: dict[AttentionKind, Counts], groups: int) -> bool | None:
        """Whether the encoder was converted, told by one of its modules."""
        family = self._family
        heads = before = self._stated(family.encoder_heads_key or family.heads_key)
        stated = config_value(self._config, family.encoder_kv_heads_key)
        if family.kv_heads == "stated" and stated is not None:
            before = stated
        if type(heads) is not int or heads < 1 or type(before) is not int or before < 1 or heads % before:
            raise ConfigError(
                f"{self._source.folder}/config.json states {before!r} K/V heads for {heads!r} of the encoder: repair it"
            )
        counts["encoder"] = Counts(heads, before, groups)
        after = self._count(self._out, module, "encoder", heads)
        if after != before:
            if after != groups or (before % groups and groups % before):
                raise Failure(
                    f"{module} has {after} K/V heads, {before} in SOURCE, where {groups} are those of the decoder"
                )
            return True
        return None if before == groups else False

    def _stated(self, key: str) -> Any:
        value = config_value(self._config, key)
        return config_value(self._config, "num_attention_heads") if value is None else value

    def _kv_heads(self, heads: int, module: str) -> int:
        family, config = self._family, self._config
        before: Any
        if family.kv_heads == "falcon":
            if config.get("new_decoder_architecture"):
                before = heads if config.get("num_kv_heads") is None else config["num_kv_heads"]
            else:
                before = 1 if config.get("multi_query", True) else heads
        elif family.kv_heads == "heads":
            before = heads
        else:
            before = config_value(config, family.kv_heads_keys[0])
            if before is None:
                before = self._count(self._source, module, "decoder", heads)
        if type(before) is not int or before < 1 or heads % before:
            raise ConfigError(
                f"{self._source.folder}/config.json states {before!r} K/V heads for {heads} query heads: repair it"
            )
        return before

    def _count_in_out(self, module: str, heads: int, before: int) -> int:
        probe = f"{module}.{self._family.fused or self._family.value}.weight"
        if probe not in self._out.file_of:
            raise Failure(f"{probe} is missing, so that OUT's number of K/V heads can't be told")
        after = self._count(self._out, module, "decoder", heads)
        if after < 1 or (before % after and (after % before or heads % after)):
            shapes = f"{list(self._out.shape(probe))} where SOURCE has {list(self._source.shape(probe))}"
            raise Failure(f"{probe} has shape {shapes} for {before} K/V heads: no grouping makes the one of the other")
        return after

    def _count(self, of: Weights, module: str, attention_kind: AttentionKind, heads: int) -> int:
        """K/V heads by the rows of a projection; a head's width is that of the output projection's input, which never
        changes.
        """
        family = self._family
        output = f"{module}.{family.output}.weight"
        if output not in self._source.file_of or len(self._source.shape(output)) != 2:
            raise ConfigError(f"{output} is missing in {self._source.folder}: the checkpoint is incomplete")
        width = self._source.shape(output)[0 if family.transposed else 1] // heads
        name = f"{module}.{family.fused or family.value}.weight"
        if name not in of.file_of:
            raise Failure(f"{name} is missing, so that OUT's number of K/V heads can't be told")
        shape = of.shape(name) or (0,)
        rows = shape[axis_of(family, shape)]
        queries = heads if family.fused and attention_kind != "cross" else 0
        if width < 1 or rows % width or (family.fused and (rows // width - queries) % 2):
            raise Failure(f"{module} has {rows} rows, no whole number of heads of width {width}")
        return (rows // width - queries) // 2 if family.fused else rows // width

    def _add_module(self, geometry: Geometry, module: str, attention_kind: AttentionKind) -> None:
        family, source, counts = self._family, self._source, geometry.counts[attention_kind]
        before = counts.before

        def add(suffix: str, part: Any, rows_are_heads: bool = False) -> None:
            name = f"{module}.{suffix}"
            if name in source.file_of:
                shape = source.shape(name)
                axis = axis_of(family, shape)
                if shape[axis] % before or (rows_are_heads and shape[axis] != before):
                    raise ConfigError(
                        f"{name} of {source.folder} has {shape[axis]} rows for {before} K/V heads: repair its config"
                    )
                geometry.cuts[name] = Cut(attention_kind, alone(part, before, shape[axis] // before), axis)

        for kind in ("weight", "bias"):
            if family.fused:
                name = f"{module}.{family.fused}.{kind}"
                if name in source.file_of:
                    heads = 0 if attention_kind == "cross" else counts.heads
                    shape = source.shape(name)
                    axis = axis_of(family, shape)
                    width, rest = divmod(shape[axis], heads + 2 * before)
                    if rest:
                        raise ConfigError(
                            f"{name} of {source.folder} does not hold {heads} + 2 x {before} heads: repair it"
                        )
                    geometry.cuts[name] = Cut(attention_kind, fused(family.fused_layout, heads, before, width), axis)
            else:
                add(f"{family.key}.{kind}", "key")
                add(f"{family.value}.{kind}", "value")
            if family.key_norm in ("full", "per_head"):
                add(f"{family.key_norm_name}.{kind}", "norm", rows_are_heads=family.key_norm == "per_head")
            elif family.key_norm == "per_head_list":
                names = [f"{module}.{family.key_norm_name}.{head}.{kind}" for head in range(before)]
                if names[0] in source.file_of:
                    geometry.lists.append((attention_kind, names))


def _is_module(module: str, family: Family) -> bool:
    return any(f".{module}".endswith(f".{name}") for name in family.attention)
