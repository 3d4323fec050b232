"""Finds the attention of a checkpoint in its tensor headers and checks it against the config, without reading weights."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gqa_convert.checkpoint.headers import TensorEntry
from gqa_convert.checkpoint.item_bytes import ITEM_BYTES
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.checkpoint.strict_json import Config
from gqa_convert.errors import ConfigError, OptionError, UnsupportedFamilyError, UnsupportedFormatError
from gqa_convert.families import layouts
from gqa_convert.families.family import AttentionKind as AttentionKind
from gqa_convert.families.family import Family
from gqa_convert.families.layerwise import kv_heads_by_layer
from gqa_convert.families.layouts import Section
from gqa_convert.families.wrappers import decoder_config, decoder_section


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The geometry of one attention module in the source."""

    module: str
    heads: int
    kv_heads: int
    key_head_dim: int
    value_head_dim: int
    dtype: str
    """Of the keys and values in a result."""
    attention_kind: AttentionKind

    @property
    def number(self) -> int:
        """The layer's number among those of its place, by the name of its module."""
        return int(next(part for part in self.module.split(".") if part.isdigit()))


def config_value(config: Config, dotted: str) -> Any:
    """The value at a dotted key, or None."""
    value: Any = config
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


class AttentionFinder:
    """Finds every attention module and checks its shapes against the config and against one another.

    Args:
        checkpoint: whose headers are read.
        family: its record.
        encoder: whether an encoder's self-attention is to be converted too.

    Raises:
        UnsupportedFamilyError: the config has values with which the family can't be converted.
        ConfigError: config and tensors contradict each other, or a tensor is missing.
        OptionError: `encoder` is set and there is no encoder attention.
    """

    def __init__(self, checkpoint: Checkpoint, family: Family, *, encoder: bool = False) -> None:
        self.family = family
        self.entries: Mapping[str, TensorEntry] = checkpoint.entries
        self._result_dtypes = checkpoint.result_dtypes
        section = decoder_section(checkpoint.config)
        self.where = f"{checkpoint.source_id}/config.json" + (f" ({section})" if section else "")
        self.config = config = decoder_config(checkpoint.config)
        for key, values, reason in family.refused_values:
            if config_value(config, key) in values:
                raise UnsupportedFamilyError(
                    f"{self.where} has {key} = {config_value(config, key)!r}, and so it can't be converted: {reason}"
                )
        self.heads = self._count(family.heads_key)
        attention_kinds = {module: self._attention_kind(module) for module in self._modules()}
        modules = [
            module for module, attention_kind in attention_kinds.items() if encoder or attention_kind != "encoder"
        ]
        if not modules or all(attention_kind == "encoder" for attention_kind in attention_kinds.values()):
            raise ConfigError(
                f"{checkpoint.source_id} holds no tensor that ends in {family.attention[0]}.{family.fused or family.key}.weight"
                f"{' outside its encoder' if attention_kinds else ''}, though its model type {family.model_type} has them: "
                "the config and the weights do not belong together"
            )
        if encoder and "encoder" not in attention_kinds.values():
            raise OptionError(
                f"--encoder: {checkpoint.source_id}, a {family.model_type}, has no encoder attention to convert: leave it out"
            )
        self.stated_head_dim = config_value(config, family.head_dim_key) if family.head_dim_key else None
        self._by_layer = kv_heads_by_layer(config, self.where) or ()
        self.kv_heads = self._kv_heads(next(module for module in modules if attention_kinds[module] != "encoder"))
        """The K/V heads of a layer outside an encoder; where layers differ, of the one with the most."""
        self.layers = tuple(self._layer(module, attention_kinds[module]) for module in modules)

    def _count(self, key: str) -> int:
        value = config_value(self.config, key)
        if value is None:
            key, value = "num_attention_heads", config_value(self.config, "num_attention_heads")
        if type(value) is not int or value < 1:
            raise ConfigError(f"{self.where} has {key} = {value!r} where a count belongs: repair the config")
        return value

    def _kv_heads(self, module: str) -> int:
        """The source's K/V heads, outside an encoder."""
        family, config = self.family, self.config
        if family.kv_heads == "heads":
            return self.heads
        if family.is_layerwise:
            return max(self._by_layer)
        if family.kv_heads == "falcon":  # the count acts in the new architecture only
            if config.get("new_decoder_architecture"):
                return self._count("num_kv_heads") if config.get("num_kv_heads") is not None else self.heads
            return 1 if config.get("multi_query", True) else self.heads
        stated = config_value(config, family.kv_heads_keys[0])
        return self._kv_heads_from_shapes(module) if stated is None else self._divisor(family.kv_heads_keys[0], stated)

    def _divisor(self, key: str, value: Any) -> int:
        if type(value) is not int or value < 1 or self.heads % value:
            raise ConfigError(
                f"{self.where} has {key} = {value!r}, which does not divide {self.heads} query heads: repair the config"
            )
        return value

    def _modules(self) -> list[str]:
        """Every module with a key or a value projection; a missing one is reported by the checks that follow."""
        family = self.family
        attention = "|".join(re.escape(name) for name in family.attention)
        projections = "|".join(
            re.escape(name) for name in ((family.fused,) if family.fused else (family.key, family.value))
        )
        pattern = re.compile(rf"^(.*\b(?:{attention}))\.(?:{projections})\.weight$")
        found = dict.fromkeys(match[1] for name in self.entries if (match := pattern.match(name)))
        return [module for module in found if family.owns(module)]

    def _attention_kind(self, module: str) -> AttentionKind:
        if self.family.encoder in module.split("."):
            return "encoder"
        return "cross" if module.endswith(self.family.cross_attention) else "decoder"

    def _kv_heads_from_shapes(self, module: str) -> int:
        """The count for configs older than the key: the rows of the key projection, divided by the query heads' head_dim."""
        if self.family.fused:
            raise ConfigError(
                f"{self.where} lacks {self.family.kv_heads_keys[0]}, which a fused projection needs: add it"
            )
        head_dim = self._query_head_dim(module, self.heads)
        rows = self._rows(f"{module}.{self.family.key}.weight")
        if rows % head_dim or self.heads % (rows // head_dim):
            raise ConfigError(
                f"{self.where} lacks {self.family.kv_heads_keys[0]} and the shapes of {module} do not give it: add it"
            )
        return rows // head_dim

    def _query_head_dim(self, module: str, heads: int) -> int:
        rows = self._rows(f"{module}.{self.family.query}.weight")
        factor = self.family.query_outputs
        if rows % (heads * factor):
            raise ConfigError(
                f"{module}.{self.family.query}.weight has {rows} rows, no multiple of the {heads} heads in {self.where}: "
                "the config and the weights do not belong together"
            )
        return rows // (heads * factor)

    def _rows(self, name: str) -> int:
        """The length of the axis that counts heads."""
        if name not in self.entries:
            raise ConfigError(
                f"tensor {name} is missing beside its siblings: the checkpoint is incomplete, download or copy it again"
            )
        shape = self.entries[name].shape
        if not shape or 0 in shape:
            raise ConfigError(f"tensor {name} has shape {list(shape)}: the checkpoint is damaged")
        return shape[-1] if self.family.transposed else shape[0]

    def _layer(self, module: str, attention_kind: AttentionKind) -> AttentionLayer:
        family = self.family
        heads, kv_heads = self.heads, self.kv_heads
        if self._by_layer:
            kv_heads = self._of_layer(module)
        if attention_kind == "encoder":
            assert family.encoder_heads_key is not None
            heads = kv_heads = self._count(family.encoder_heads_key)
            stated = config_value(self.config, family.encoder_kv_heads_key)
            if stated is not None and family.kv_heads == "stated":
                kv_heads = self._divisor(family.encoder_kv_heads_key, stated)
        if family.fused:
            name = f"{module}.{family.fused}.weight"
            head_dim = self._fused_head_dim(name, 0 if attention_kind == "cross" else heads, kv_heads)
            self._check_output(module, heads, head_dim)
            return AttentionLayer(module, heads, kv_heads, head_dim, head_dim, self._mergeable(name), attention_kind)
        key, value = f"{module}.{family.key}.weight", f"{module}.{family.value}.weight"
        head_dims = []
        for name in (key, value):
            rows = self._rows(name)
            if rows % kv_heads:
                raise self._contradiction(name, rows, f"{kv_heads} K/V heads")
            head_dims.append(rows // kv_heads)
        query_head_dim = self._query_head_dim(module, heads)
        if head_dims[0] != query_head_dim:
            raise self._contradiction(
                key, self._rows(key), f"{kv_heads} K/V heads with head_dim {query_head_dim} (that of the query heads)"
            )
        if self.stated_head_dim is not None and head_dims[0] != self.stated_head_dim:
            raise self._contradiction(key, self._rows(key), f"{family.head_dim_key} = {self.stated_head_dim}")
        self._check_output(module, heads, head_dims[1])
        return AttentionLayer(
            module, heads, kv_heads, head_dims[0], head_dims[1], self._mergeable(key, value), attention_kind
        )

    def _of_layer(self, module: str) -> int:
        """The K/V heads that the config states for the module's layer."""
        number = int(next(part for part in module.split(".") if part.isdigit()))
        if number >= len(self._by_layer):
            raise ConfigError(
                f"{self.where} states the K/V heads of {len(self._by_layer)} layers, and the weights hold {module}: the config "
                "and the weights do not belong together"
            )
        return self._by_layer[number]

    def _check_output(self, module: str, heads: int, value_head_dim: int) -> None:
        """Check the shape of the output projection: [d, H * head_dim of values]."""
        name = f"{module}.{self.family.output}.weight"
        entry = self.entries.get(name)
        if (
            entry is None
            or len(entry.shape) != 2
            or entry.shape[0 if self.family.transposed else 1] != heads * value_head_dim
        ):
            found = "is missing" if entry is None else f"has shape {list(entry.shape)}"
            raise ConfigError(
                f"{name} {found} where {heads} heads with head_dim {value_head_dim} belong ({self.where}): "
                "the config and the weights do not belong together"
            )

    def _fused_head_dim(self, name: str, heads: int, kv_heads: int) -> int:
        rows = self._rows(name)
        total = heads + 2 * kv_heads
        quarters = self.family.fused_layout == "quarters"
        if (
            rows % total
            or (self.stated_head_dim is not None and rows // total != self.stated_head_dim)
            or (quarters and heads % 4)
        ):
            raise self._contradiction(name, rows, f"{heads} query heads and twice {kv_heads} K/V heads")
        return rows // total

    def _contradiction(self, name: str, rows: int, expected: str) -> ConfigError:
        return ConfigError(
            f"{name} has {rows} rows, which contradicts {expected} in {self.where}: the config and the weights do not belong together"
        )

    def dtype(self, name: str) -> str:
        """The type that a tensor has in the result."""
        return self._result_dtypes.get(name, self.entries[name].dtype)

    def _mergeable(self, *names: str) -> str:
        dtypes = {self.dtype(name) for name in names}
        if len(dtypes) != 1 or not dtypes <= set(ITEM_BYTES):
            raise UnsupportedFormatError(
                f"{names[0]} has type {', '.join(sorted(dtypes))}, which can't be merged: save the model in one float type"
            )
        return dtypes.pop()

    def sections(self, layer: AttentionLayer) -> Iterator[tuple[str, tuple[Section, ...]]]:
        """Every tensor of a layer whose rows count K/V heads, with its division into heads."""
        family, module, kv_heads = self.family, layer.module, layer.kv_heads
        for kind in ("weight", "bias"):
            if family.fused:
                heads = 0 if layer.attention_kind == "cross" else layer.heads
                candidates = [
                    (
                        f"{module}.{family.fused}.{kind}",
                        layouts.fused(family.fused_layout, heads, kv_heads, layer.key_head_dim),
                    )
                ]
            else:
                candidates = [
                    (f"{module}.{family.key}.{kind}", layouts.separate("key", kv_heads, layer.key_head_dim)),
                    (f"{module}.{family.value}.{kind}", layouts.separate("value", kv_heads, layer.value_head_dim)),
                ]
            norm = f"{module}.{family.key_norm_name}.{kind}"
            if family.key_norm == "full":
                candidates.append((norm, layouts.separate("key_norm", kv_heads, layer.key_head_dim)))
            elif family.key_norm == "per_head":
                candidates.append((norm, layouts.separate("key_norm", kv_heads, 1)))
            for name, cut in candidates:
                if name in self.entries:
                    rows = self._rows(name)
                    if rows != sum(section.rows for section in cut):
                        raise self._contradiction(
                            name, rows, f"{kv_heads} K/V heads with head_dim {layer.key_head_dim}"
                        )
                    yield name, cut

    def query_sections(self, layer: AttentionLayer) -> Iterator[tuple[str, tuple[Section, ...]]]:
        """The tensors of a layer's queries, where they have a projection of their own, with their division into heads."""
        family = self.family
        if family.fused and layer.attention_kind != "cross":
            return
        sections = layouts.queries(layer.heads, layer.key_head_dim, family.query_outputs)
        for kind in ("weight", "bias"):
            name = f"{layer.module}.{family.query}.{kind}"
            if name in self.entries:
                yield name, sections

    def head_lists(self, layer: AttentionLayer) -> Iterator[list[str]]:
        """Lists of tensors with one tensor per K/V head, in the order of heads."""
        if self.family.key_norm != "per_head_list":
            return
        for kind in ("weight", "bias"):
            names = [f"{layer.module}.{self.family.key_norm_name}.{head}.{kind}" for head in range(layer.kv_heads)]
            if names[0] in self.entries:
                for name in names:
                    self._rows(name)
                yield names
