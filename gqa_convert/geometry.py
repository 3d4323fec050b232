"""Finds the attention of a checkpoint in its tensor headers, and checks it against the config: data in, no weights read."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gqa_convert import layouts
from gqa_convert.checkpoint.headers import TensorEntry
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.errors import ConfigError, UnsupportedFamilyError, UnsupportedFormatError
from gqa_convert.families import Family
from gqa_convert.layouts import Section
from gqa_convert.merging.pooling import DTYPES


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The geometry of one attention module: K/V heads in the source, width of a key head and of a value head."""

    module: str
    kv_heads: int
    key_width: int
    value_width: int
    dtype: str


def config_value(config: dict[str, Any], dotted: str) -> Any:
    """The value at a dotted key, or None."""
    value: Any = config
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


class AttentionFinder:
    """Finds every attention module and checks its shapes against the config and against one another."""

    def __init__(self, checkpoint: Checkpoint, family: Family) -> None:
        self.family = family
        self.entries: dict[str, TensorEntry] = {name: entry for _, name, entry in checkpoint.tensors()}
        self.where = f"{checkpoint.source_id}/config.json"
        config = checkpoint.config
        for key, reason in family.refused_when:
            if config_value(config, key):
                raise UnsupportedFamilyError(f"{self.where} sets {key}, and so it can't be converted: {reason}")
        self.heads = self._count(config, family.heads_key)
        modules = self._modules()
        if not modules:
            raise ConfigError(
                f"{checkpoint.source_id} holds no tensor that ends in {family.attention[0]}.{family.fused or family.key}.weight, "
                f"though its model type {family.model_type} has them: the config and the weights do not belong together"
            )
        stated = config_value(config, family.kv_heads_keys[0])
        self.kv_heads = self._stated_kv_heads(stated) if stated is not None else self._kv_heads_from_shapes(modules[0])
        self.stated_width = config_value(config, family.head_width_key) if family.head_width_key else None
        self.layers = tuple(self._layer(module) for module in modules)

    def _count(self, config: dict[str, Any], key: str) -> int:
        value = config_value(config, key)
        if type(value) is not int or value < 1:
            raise ConfigError(f"{self.where} has {key} = {value!r} where a count belongs: repair the config")
        return value

    def _stated_kv_heads(self, value: Any) -> int:
        if type(value) is not int or value < 1 or self.heads % value:
            raise ConfigError(
                f"{self.where} has {self.family.kv_heads_keys[0]} = {value!r}, which does not divide {self.heads} query heads: repair the config"
            )
        return value

    def _modules(self) -> list[str]:
        """Every module with a key or a value projection: one without the other is found out later."""
        family = self.family
        attention = "|".join(re.escape(name) for name in family.attention)
        projections = "|".join(re.escape(name) for name in ((family.fused,) if family.fused else (family.key, family.value)))
        pattern = re.compile(rf"^(.*\b(?:{attention}))\.(?:{projections})\.weight$")
        return list(dict.fromkeys(match[1] for name in self.entries if (match := pattern.match(name))))

    def _kv_heads_from_shapes(self, module: str) -> int:
        """For configs older than the key: as many K/V heads as the key rows hold query-head widths."""
        if self.family.fused:
            raise ConfigError(f"{self.where} lacks {self.family.kv_heads_keys[0]}, which a fused projection needs: add it")
        width = self._query_width(module)
        rows = self._rows(f"{module}.{self.family.key}.weight")
        if rows % width or self.heads % (rows // width):
            raise ConfigError(f"{self.where} lacks {self.family.kv_heads_keys[0]} and the shapes of {module} do not tell it: add it")
        return rows // width

    def _query_width(self, module: str) -> int:
        rows = self._rows(f"{module}.{self.family.query}.weight")
        factor = self.family.query_outputs
        if rows % (self.heads * factor):
            raise ConfigError(
                f"{module}.{self.family.query}.weight has {rows} rows, no multiple of the {self.heads} heads in {self.where}: "
                "the config and the weights do not belong together"
            )
        return rows // (self.heads * factor)

    def _rows(self, name: str) -> int:
        if name not in self.entries:
            raise ConfigError(f"tensor {name} is missing beside its siblings: the checkpoint is incomplete, download or copy it again")
        shape = self.entries[name].shape
        if not shape or shape[0] == 0:
            raise ConfigError(f"tensor {name} has shape {list(shape)}: the checkpoint is damaged")
        return shape[0]

    def _layer(self, module: str) -> AttentionLayer:
        family = self.family
        if family.fused:
            name = f"{module}.{family.fused}.weight"
            width = self._fused_width(name)
            self._check_output(module, width)
            return AttentionLayer(module, self.kv_heads, width, width, self._mergeable(name))
        key, value = f"{module}.{family.key}.weight", f"{module}.{family.value}.weight"
        widths = []
        for name in (key, value):
            rows = self._rows(name)
            if rows % self.kv_heads:
                raise self._contradiction(name, rows, f"{self.kv_heads} K/V heads")
            widths.append(rows // self.kv_heads)
        query_width = self._query_width(module)
        if widths[0] != query_width:
            raise self._contradiction(key, self._rows(key), f"{self.kv_heads} K/V heads of width {query_width} (the query heads' width)")
        if self.stated_width is not None and widths[0] != self.stated_width:
            raise self._contradiction(key, self._rows(key), f"{family.head_width_key} = {self.stated_width}")
        self._check_output(module, widths[1])
        return AttentionLayer(module, self.kv_heads, widths[0], widths[1], self._mergeable(key, value))

    def _check_output(self, module: str, value_width: int) -> None:
        """The output projection reads what the query heads bring: [d, H * value width]."""
        name = f"{module}.{self.family.output}.weight"
        entry = self.entries.get(name)
        if entry is None or len(entry.shape) != 2 or entry.shape[1] != self.heads * value_width:
            found = "is missing" if entry is None else f"has shape {list(entry.shape)}"
            raise ConfigError(
                f"{name} {found} where {self.heads} heads of width {value_width} belong ({self.where}): "
                "the config and the weights do not belong together"
            )

    def _fused_width(self, name: str) -> int:
        rows = self._rows(name)
        total = self.heads + 2 * self.kv_heads
        if rows % total or (self.stated_width is not None and rows // total != self.stated_width):
            raise self._contradiction(name, rows, f"{self.heads} query heads and twice {self.kv_heads} K/V heads")
        return rows // total

    def _contradiction(self, name: str, rows: int, expected: str) -> ConfigError:
        return ConfigError(
            f"{name} has {rows} rows, which contradicts {expected} in {self.where}: the config and the weights do not belong together"
        )

    def _mergeable(self, *names: str) -> str:
        dtypes = {self.entries[name].dtype for name in names}
        if len(dtypes) != 1 or not dtypes <= set(DTYPES):
            raise UnsupportedFormatError(
                f"{names[0]} has type {', '.join(sorted(dtypes))}, which can't be merged: save the model in one float type"
            )
        return dtypes.pop()

    def sections(self, layer: AttentionLayer) -> Iterator[tuple[str, tuple[Section, ...]]]:
        """Every tensor of a layer whose leading axis counts K/V heads, with its cut into heads."""
        family, module = self.family, layer.module
        key, value = Section("key", layer.kv_heads, layer.key_width, True), Section("value", layer.kv_heads, layer.value_width, True)
        for kind in ("weight", "bias"):
            if family.fused:
                cut = layouts.fused(self.heads * layer.key_width, layer.kv_heads, layer.key_width, layer.value_width)
                candidates = [(f"{module}.{family.fused}.{kind}", cut)]
            else:
                candidates = [(f"{module}.{family.key}.{kind}", (key,)), (f"{module}.{family.value}.{kind}", (value,))]
            norm = f"{module}.{family.key_norm_name}.{kind}"
            if family.key_norm == "full":
                candidates.append((norm, layouts.separate("key_norm", layer.kv_heads, layer.key_width)))
            elif family.key_norm == "per_head":
                candidates.append((norm, layouts.separate("key_norm", layer.kv_heads, 1)))
            for name, cut in candidates:
                if name in self.entries:
                    rows = self._rows(name)
                    if rows != sum(section.rows for section in cut):
                        raise self._contradiction(name, rows, f"{layer.kv_heads} K/V heads of width {layer.key_width}")
                    yield name, cut

    def head_lists(self, layer: AttentionLayer) -> Iterator[list[str]]:
        """Runs of tensors of which each belongs to one K/V head, in head order."""
        if self.family.key_norm != "per_head_list":
            return
        for kind in ("weight", "bias"):
            names = [f"{layer.module}.{self.family.key_norm_name}.{head}.{kind}" for head in range(layer.kv_heads)]
            if names[0] in self.entries:
                for name in names:
                    self._rows(name)
                yield names
