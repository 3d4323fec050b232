"""Reads a checkpoint's geometry from SOURCE's config and the shapes of both checkpoints' tensors.

The converter reads the same facts from the same files with different code. The agreement of the two is part of the
proof.
"""

from typing import Any

from gqa_convert.errors import ConfigError
from gqa_convert.families.family import Family, Modeling
from gqa_convert.verify.checkpoint_reader import CONFIG, Weights
from gqa_convert.verify.geometry import (
    AttentionKind,
    Counts,
    Cut,
    Geometry,
    NormList,
    config_value,
    layer_number,
    module_kind,
)
from gqa_convert.verify.layerwise import stated_kv_heads
from gqa_convert.verify.layout import Part, axis_of, fused, separate
from gqa_convert.verify.report import Failure


def read_geometry(
    family: Family, config: dict[str, Any], source: Weights, out: Weights, *, form: Modeling | None = None
) -> Geometry:
    """The geometry of SOURCE. OUT's counts come from the shapes of one projection each in decoder and encoder or, where
    layers may differ, in each layer.

    Args:
        family: SOURCE's family.
        config: SOURCE's config.
        source: SOURCE's tensors.
        out: OUT's tensors.
        form: that OUT has for layers that differ; None where layers may not differ.

    Raises:
        ConfigError: SOURCE contradicts itself.
        Failure: OUT's number of K/V heads cannot be determined.
    """
    return _Reader(family, config, source, out, form).read()


class _Reader:
    """Reads one geometry; the arguments are those of `read_geometry`."""

    def __init__(
        self, family: Family, config: dict[str, Any], source: Weights, out: Weights, form: Modeling | None
    ) -> None:
        self._family = family
        self._config = config
        self._source = source
        self._out = out
        self._form = form
        self._values = f"{family.fused or family.value}.weight"
        """The tensor below a module whose rows give the number of K/V heads."""

    def read(self) -> Geometry:
        modules = self._modules()
        heads = self._stated(self._family.heads_key)
        first = _first(modules, "decoder")
        if type(heads) is not int or heads < 1 or first is None:
            found = f"{len(modules)} attention modules of {heads!r} heads"
            raise ConfigError(
                f"{self._source.folder} is not a {self._family.model_type} checkpoint: it has {found}, check its config"
            )
        layers = self._read_layers(modules, heads) if self._form else {}
        if layers:
            before, after = (
                max(each) for each in zip(*((one.before, one.after) for one in layers.values()), strict=True)
            )
        else:
            before = self._kv_heads(heads, first)
            after = self._count_in_out(first, heads, before)
        counts: dict[AttentionKind, Counts] = {"decoder": Counts(heads, before, after)}
        if _first(modules, "cross") is not None:
            counts["cross"] = counts["decoder"]
        encoder: bool | None = False
        inside = _first(modules, "encoder")
        if inside is not None:
            own, encoder = self._read_encoder(inside, after)
            if encoder:
                counts["encoder"] = own
        geometry = Geometry(
            counts,
            {module: kind for module, kind in modules.items() if kind in counts},
            encoder,
            by_layer=layers,
            form=self._form,
        )
        for module, kind in geometry.modules.items():
            self._add_module(geometry, module, kind)
        return geometry

    def _read_layers(self, modules: dict[str, AttentionKind], heads: int) -> dict[int, Counts]:
        """The heads of each layer of a decoder."""
        layers = {}
        for module in modules:
            number = layer_number(module)
            if self._family.is_layerwise:
                before = stated_kv_heads(self._config, number)
            else:
                before = self._kv_heads(heads, module)
            layers[number] = Counts(heads, before, self._count_in_out(module, heads, before))
        return layers

    def _modules(self) -> dict[str, AttentionKind]:
        """SOURCE's attention modules, in the order of its tensors."""
        modules = (
            name.removesuffix(f".{self._values}") for name in self._source.file_of if name.endswith(f".{self._values}")
        )
        return {module: kind for module in modules if (kind := module_kind(module, self._family))}

    def _read_encoder(self, module: str, groups: int) -> tuple[Counts, bool | None]:
        """The encoder's heads, and whether it was converted, which one of its modules shows; None if that is open."""
        family = self._family
        heads = before = self._stated(family.encoder_heads_key or family.heads_key)
        stated = config_value(self._config, family.encoder_kv_heads_key)
        if family.kv_heads == "stated" and stated is not None:
            before = stated
        if type(heads) is not int or heads < 1 or type(before) is not int or before < 1 or heads % before:
            raise self._contradiction(before, f"the encoder's {heads!r} query heads")
        after = self._count(self._out, module, "encoder", heads)
        if after == before:
            return Counts(heads, before, groups), None if before == groups else False
        if after != groups or (before % groups and groups % before):
            raise Failure(f"{module} has {after} K/V heads ({before} in SOURCE), but the decoder has {groups}")
        return Counts(heads, before, groups), True

    def _contradiction(self, kv_heads: Any, whose: str) -> ConfigError:
        return ConfigError(f"{self._source.folder}/{CONFIG} states {kv_heads!r} K/V heads for {whose}: repair it")

    def _stated(self, key: str) -> Any:
        value = config_value(self._config, key)
        return config_value(self._config, "num_attention_heads") if value is None else value

    def _kv_heads(self, heads: int, module: str) -> int:
        """SOURCE's K/V heads, stated or counted in a module."""
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
            raise self._contradiction(before, f"{heads} query heads")
        return before

    def _count_in_out(self, module: str, heads: int, before: int) -> int:
        """OUT's K/V heads, counted in a module."""
        after = self._count(self._out, module, "decoder", heads)
        if after < 1 or (before % after and (after % before or heads % after)):
            name = f"{module}.{self._values}"
            shapes = f"{list(self._out.shape(name))} in OUT and {list(self._source.shape(name))} in SOURCE"
            raise Failure(f"{name} is {shapes}: {before} K/V heads cannot be grouped or repeated to that shape")
        return after

    def _count(self, weights: Weights, module: str, attention_kind: AttentionKind, heads: int) -> int:
        """K/V heads of a module by the rows of its projection.

        The head_dim is that of the output projection's input, which no conversion changes.
        """
        family = self._family
        output = f"{module}.{family.output}.weight"
        if output not in self._source.file_of or len(self._source.shape(output)) != 2:
            raise ConfigError(
                f"{self._source.folder} has no matrix {output}: the checkpoint is incomplete, copy it again"
            )
        head_dim = self._source.shape(output)[0 if family.transposed else 1] // heads
        name = f"{module}.{self._values}"
        if name not in weights.file_of:
            raise Failure(f"{name} is missing, from which OUT's number of K/V heads follows")
        shape = weights.shape(name) or (0,)
        rows = shape[axis_of(family, shape)]
        queries = heads if family.fused and attention_kind != "cross" else 0
        if head_dim < 1 or rows % head_dim or (family.fused and (rows // head_dim - queries) % 2):
            raise Failure(f"{module} has {rows} rows, which are not a whole number of heads of {head_dim} rows")
        return (rows // head_dim - queries) // 2 if family.fused else rows // head_dim

    def _add_module(self, geometry: Geometry, module: str, attention_kind: AttentionKind) -> None:
        family, counts = self._family, geometry.of(module, attention_kind)
        for kind in ("weight", "bias"):
            if family.fused:
                self._add_fused(geometry, f"{module}.{family.fused}.{kind}", attention_kind)
            else:
                self._add_separate(geometry, f"{module}.{family.key}.{kind}", attention_kind, "key")
                self._add_separate(geometry, f"{module}.{family.value}.{kind}", attention_kind, "value")
            if family.key_norm in ("full", "per_head"):
                self._add_separate(geometry, f"{module}.{family.key_norm_name}.{kind}", attention_kind, "norm")
            elif family.key_norm == "per_head_list":
                names = [f"{module}.{family.key_norm_name}.{head}.{kind}" for head in range(counts.before)]
                if names[0] in self._source.file_of:
                    geometry.lists.append(NormList(attention_kind, names))

    def _add_fused(self, geometry: Geometry, name: str, attention_kind: AttentionKind) -> None:
        if name not in self._source.file_of:
            return
        family, counts = self._family, geometry.of(name, attention_kind)
        heads = 0 if attention_kind == "cross" else counts.heads
        shape = self._source.shape(name)
        axis = axis_of(family, shape)
        head_dim, rest = divmod(shape[axis], heads + 2 * counts.before)
        if rest:
            raise ConfigError(
                f"{name} of {self._source.folder} has {shape[axis]} rows, which are not {heads} + 2 x {counts.before} "
                "heads: repair its config"
            )
        geometry.cuts[name] = Cut(attention_kind, fused(family.fused_layout, heads, counts.before, head_dim), axis)

    def _add_separate(self, geometry: Geometry, name: str, attention_kind: AttentionKind, part: Part) -> None:
        if name not in self._source.file_of:
            return
        family, before = self._family, geometry.of(name, attention_kind).before
        shape = self._source.shape(name)
        axis = axis_of(family, shape)
        rows_are_heads = part == "norm" and family.key_norm == "per_head"
        if shape[axis] % before or (rows_are_heads and shape[axis] != before):
            raise ConfigError(
                f"{name} of {self._source.folder} has {shape[axis]} rows for {before} K/V heads: repair its config"
            )
        geometry.cuts[name] = Cut(attention_kind, separate(part, before, shape[axis] // before), axis)


def _first(modules: dict[str, AttentionKind], attention_kind: AttentionKind) -> str | None:
    return next((module for module, kind in modules.items() if kind == attention_kind), None)
