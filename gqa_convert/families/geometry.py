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
from gqa_convert.families.records import with_key_norm
from gqa_convert.families.wrappers import decoder_config, decoder_section

_APART = "the config and the weights do not belong together"


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
        return _number(self.module)


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
        self.config = decoder_config(checkpoint.config)
        self._refuse_values()
        self.heads = self._count(family.heads_key)
        kinds = self._attention_kinds()
        decoder = [module for module in kinds if kinds[module] != "encoder"]
        if not decoder:
            raise ConfigError(
                f"{checkpoint.source_id} holds no tensor that ends in {family.attention[0]}.{family.fused or family.key}.weight"
                f"{' outside its encoder' if kinds else ''}, though its model type {family.model_type} has them: {_APART}"
            )
        if encoder and "encoder" not in kinds.values():
            raise OptionError(
                f"--encoder: {checkpoint.source_id}, a {family.model_type}, has no encoder attention to convert: leave it out"
            )
        self.stated_head_dim = config_value(self.config, family.head_dim_key) if family.head_dim_key else None
        self._by_layer = kv_heads_by_layer(self.config, self.where)
        self.kv_heads = self._kv_heads(decoder[0])
        """The K/V heads of a layer outside an encoder; where layers differ, of the one with the most."""
        if not family.listed:
            shapes = {name: entry.shape for name, entry in self.entries.items()}
            self.family = with_key_norm(family, shapes, self.kv_heads)
        modules = kinds if encoder else decoder
        self.layers = tuple(self._layer(module, kinds[module]) for module in modules)

    def _refuse_values(self) -> None:
        for key, values, reason in self.family.refused_values:
            value = config_value(self.config, key)
            if value in values:
                raise UnsupportedFamilyError(
                    f"{self.where} has {key} = {value!r}, and so it can't be converted: {reason}"
                )

    def _attention_kinds(self) -> dict[str, AttentionKind]:
        """Every module with a key or a value projection; a missing one is reported by the checks that follow."""
        family = self.family
        attention = "|".join(map(re.escape, family.attention))
        names = [family.fused] if family.fused else [family.key, family.value]
        projections = "|".join(map(re.escape, names))
        pattern = re.compile(rf"^(.*\b(?:{attention}))\.(?:{projections})\.weight$")
        found: dict[str, AttentionKind] = {}
        for name in self.entries:
            match = pattern.match(name)
            if match and family.owns(match[1]):
                found[match[1]] = self._attention_kind(match[1])
        return found

    def _attention_kind(self, module: str) -> AttentionKind:
        if self.family.encoder in module.split("."):
            return "encoder"
        return "cross" if module.endswith(self.family.cross_attention) else "decoder"

    # Counts of heads

    def _count(self, key: str) -> int:
        value = config_value(self.config, key)
        if value is None:
            key, value = "num_attention_heads", config_value(self.config, "num_attention_heads")
        if type(value) is not int or value < 1:
            raise ConfigError(f"{self.where} has {key} = {value!r} where a count belongs: repair the config")
        return value

    def _divisor(self, key: str, value: Any) -> int:
        if type(value) is not int or value < 1 or self.heads % value:
            raise ConfigError(
                f"{self.where} has {key} = {value!r}, which does not divide {self.heads} query heads: repair the config"
            )
        return value

    def _kv_heads(self, module: str) -> int:
        """The source's K/V heads, outside an encoder."""
        family, config = self.family, self.config
        if self._by_layer:
            return max(self._by_layer)
        if family.kv_heads == "heads":
            return self.heads
        if family.kv_heads == "falcon":  # the count acts in the new architecture only
            if config.get("new_decoder_architecture"):
                return self._count("num_kv_heads") if config.get("num_kv_heads") is not None else self.heads
            return 1 if config.get("multi_query", True) else self.heads
        key = family.kv_heads_keys[0]
        stated = config_value(config, key)
        return self._kv_heads_from_shapes(module, key) if stated is None else self._divisor(key, stated)

    def _kv_heads_from_shapes(self, module: str, key: str) -> int:
        """The count for configs older than the key: the rows of the key projection, divided by the query heads' head_dim."""
        if self.family.fused:
            raise ConfigError(f"{self.where} lacks {key}, which a fused projection needs: add it")
        kv_heads, rest = divmod(
            self._rows(f"{module}.{self.family.key}.weight"), self._query_head_dim(module, self.heads)
        )
        if rest or not kv_heads or self.heads % kv_heads:
            raise ConfigError(f"{self.where} lacks {key} and the shapes of {module} do not give it: add it")
        return kv_heads

    def _counts(self, module: str, attention_kind: AttentionKind) -> tuple[int, int]:
        """The query heads and the K/V heads of a module."""
        family = self.family
        if attention_kind == "encoder":
            heads = self._count(str(family.encoder_heads_key))
            stated = config_value(self.config, family.encoder_kv_heads_key)
            if stated is None or family.kv_heads != "stated":
                return heads, heads
            return heads, self._divisor(family.encoder_kv_heads_key, stated)
        if not self._by_layer:
            return self.heads, self.kv_heads
        number = _number(module)
        if number >= len(self._by_layer):
            raise ConfigError(
                f"{self.where} states the K/V heads of {len(self._by_layer)} layers, and the weights hold {module}: {_APART}"
            )
        return self.heads, self._by_layer[number]

    # Shapes

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

    def _query_head_dim(self, module: str, heads: int) -> int:
        name = f"{module}.{self.family.query}.weight"
        rows = self._rows(name)
        head_dim, rest = divmod(rows, heads * self.family.query_outputs)
        if rest:
            raise ConfigError(f"{name} has {rows} rows, no multiple of the {heads} heads in {self.where}: {_APART}")
        return head_dim

    def _head_dim(self, name: str, heads: int, what: str) -> int:
        """The rows of a head in a projection of so many heads."""
        head_dim, rest = divmod(self._rows(name), heads)
        if rest:
            raise self._contradiction(name, what)
        return head_dim

    def _contradiction(self, name: str, expected: str) -> ConfigError:
        return ConfigError(
            f"{name} has {self._rows(name)} rows, which contradicts {expected} in {self.where}: {_APART}"
        )

    def _layer(self, module: str, attention_kind: AttentionKind) -> AttentionLayer:
        family = self.family
        heads, kv_heads = self._counts(module, attention_kind)
        if family.fused:
            names = [f"{module}.{family.fused}.weight"]
            queries = 0 if attention_kind == "cross" else heads
            what = f"{queries} query heads and twice {kv_heads} K/V heads"
            key_head_dim = value_head_dim = self._head_dim(names[0], queries + 2 * kv_heads, what)
            if family.fused_layout == "quarters" and heads % 4:
                raise self._contradiction(names[0], what)
        else:
            names = [f"{module}.{family.key}.weight", f"{module}.{family.value}.weight"]
            key_head_dim, value_head_dim = (self._head_dim(name, kv_heads, f"{kv_heads} K/V heads") for name in names)
            query_head_dim = self._query_head_dim(module, heads)
            if key_head_dim != query_head_dim:
                what = f"{kv_heads} K/V heads with head_dim {query_head_dim} (that of the query heads)"
                raise self._contradiction(names[0], what)
        if self.stated_head_dim not in (None, key_head_dim):
            raise self._contradiction(names[0], f"{family.head_dim_key} = {self.stated_head_dim}")
        self._check_output(module, heads, value_head_dim)
        dtype = self._mergeable(names)
        return AttentionLayer(module, heads, kv_heads, key_head_dim, value_head_dim, dtype, attention_kind)

    def _check_output(self, module: str, heads: int, value_head_dim: int) -> None:
        """Check the shape of the output projection: [d, H * head_dim of values]."""
        name = f"{module}.{self.family.output}.weight"
        entry = self.entries.get(name)
        inputs = 0 if self.family.transposed else 1
        if entry is None or len(entry.shape) != 2 or entry.shape[inputs] != heads * value_head_dim:
            found = "is missing" if entry is None else f"has shape {list(entry.shape)}"
            raise ConfigError(
                f"{name} {found} where {heads} heads with head_dim {value_head_dim} belong ({self.where}): {_APART}"
            )

    def dtype(self, name: str) -> str:
        """The type that a tensor has in the result."""
        return self._result_dtypes.get(name, self.entries[name].dtype)

    def _mergeable(self, names: list[str]) -> str:
        dtypes = {self.dtype(name) for name in names}
        if len(dtypes) != 1 or not dtypes <= set(ITEM_BYTES):
            raise UnsupportedFormatError(
                f"{names[0]} has type {', '.join(sorted(dtypes))}, which can't be merged: save the model in one float type"
            )
        return dtypes.pop()

    # Divisions into heads

    def sections(self, layer: AttentionLayer) -> Iterator[tuple[str, tuple[Section, ...]]]:
        """Every tensor of a layer whose rows count K/V heads, with its division into heads."""
        for kind in ("weight", "bias"):
            for name, cut in self._cuts(layer).items():
                tensor = f"{layer.module}.{name}.{kind}"
                if tensor not in self.entries:
                    continue
                if self._rows(tensor) != sum(section.rows for section in cut):
                    raise self._contradiction(tensor, f"{layer.kv_heads} K/V heads with head_dim {layer.key_head_dim}")
                yield tensor, cut

    def _cuts(self, layer: AttentionLayer) -> dict[str, tuple[Section, ...]]:
        """The divisions of a layer's projections and norms, by their names."""
        family, kv_heads = self.family, layer.kv_heads
        if family.fused:
            heads = 0 if layer.attention_kind == "cross" else layer.heads
            cuts = {family.fused: layouts.fused(family.fused_layout, heads, kv_heads, layer.key_head_dim)}
        else:
            cuts = {
                family.key: layouts.separate("key", kv_heads, layer.key_head_dim),
                family.value: layouts.separate("value", kv_heads, layer.value_head_dim),
            }
        if family.key_norm == "full":
            cuts[family.key_norm_name] = layouts.separate("key_norm", kv_heads, layer.key_head_dim)
        elif family.key_norm == "per_head":
            cuts[family.key_norm_name] = layouts.separate("key_norm", kv_heads, 1)
        return cuts

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


def _number(module: str) -> int:
    """The number of a module's layer."""
    return int(next(part for part in module.split(".") if part.isdigit()))
