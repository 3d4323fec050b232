"""Finds the attention of a checkpoint in its tensor headers and checks it against the config,
without reading weights.
"""

import re
from typing import NamedTuple

from gqa_convert.checkpoint.headers import ITEM_BYTES
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.errors import ConfigError, UnsupportedFamilyError, UnsupportedFormatError

from . import layouts
from .composite import config_value, decoder_config, decoder_section
from .family import AttentionKind as AttentionKind
from .family import Family
from .layerwise import is_run, kv_heads_by_layer
from .layouts import Sections
from .records import with_key_norm

_APART = "the config and the weights do not belong together"


class AttentionLayer(NamedTuple):
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


class AttentionFinder:
    """Finds every attention module and checks its shapes against the config and against one
    another.

    Args:
        checkpoint: whose headers are read.
        family: its record.

    Attributes:
        where: the config, for messages.
        config: of the decoder.
        heads: query heads of a layer.
        kv_heads: K/V heads of a layer; where layers differ, of the one with the most.
        layers: the modules that transformers runs.
        unused_layers: those that it leaves out, such as layers for multi-token prediction.

    Raises:
        UnsupportedFamilyError: the config has values with which the family can't be converted.
        ConfigError: config and tensors contradict each other, or a tensor is missing.
    """

    def __init__(self, checkpoint: Checkpoint, family: Family) -> None:
        self.family = family
        self.entries = checkpoint.entries
        self._result_dtypes = checkpoint.result_dtypes
        section = decoder_section(checkpoint.config)
        self.where = f"{checkpoint.source_id}/config.json" + (f" ({section})" if section else "")
        self.config = decoder_config(checkpoint.config)
        for key, values, reason in family.refused_values:
            value = config_value(self.config, key)
            if value in values:
                raise UnsupportedFamilyError(
                    f"{self.where} has {key} = {value!r}, and so it can't be converted: {reason}"
                )

        # the heads that the config states
        self.heads = self._count(family.heads_key)
        kinds = self._attention_kinds()
        if not kinds:
            raise ConfigError(
                f"{checkpoint.source_id} holds no tensor that ends in "
                f"{family.attention[0]}.{family.fused or family.key}.weight"
                f", though its model type {family.model_type} has them: {_APART}"
            )
        by_layer = kv_heads_by_layer(self.config, self.where)
        self._by_layer = dict(enumerate(by_layer or ()))
        self.kv_heads = max(by_layer) if by_layer else self._kv_heads()
        if not family.listed:
            self.family = with_key_norm(family, self.entries, self.kv_heads)

        # the modules, of which transformers runs those where it looks for layers
        run = [module for module in kinds if is_run(family, self.config, module)] or [*kinds]
        self.layers = tuple(self._layer(module, kinds[module]) for module in run)
        # a config that states the heads of each layer says nothing of others
        unused = [] if by_layer else [module for module in kinds if module not in run]
        self.unused_layers = tuple(self._layer(module, kinds[module]) for module in unused)

    def _attention_kinds(self) -> dict[str, AttentionKind]:
        """Every module with a key or a value projection, but for those of an encoder."""
        family = self.family
        attention = "|".join(map(re.escape, family.attention))
        projections = family.fused or f"{family.key}|{family.value}"
        pattern = re.compile(rf"(.*\b(?:{attention}))\.(?:{projections})\.weight")
        found: dict[str, AttentionKind] = {}
        for match in filter(None, map(pattern.fullmatch, self.entries)):
            module = match[1]
            if family.owns(module) and family.encoder not in module.split("."):
                found[module] = "cross" if module.endswith(family.cross_attention) else "decoder"
        return found

    # Counts of heads

    def _count(self, key: str, heads: int = 0) -> int:
        """A number of heads that the config states: of query heads, or of K/V heads, which divide
        `heads` query heads, and are as many where none are stated.
        """
        value = config_value(self.config, key)
        if value is None:
            value = heads or config_value(self.config, "num_attention_heads")
        if type(value) is not int or value < 1 or heads % value:
            expected = f"a divisor of {heads} query heads" if heads else "a count"
            raise ConfigError(
                f"{self.where} has {key} = {value!r} where {expected} belongs: repair the config"
            )
        return value

    def _kv_heads(self) -> int:
        """The source's K/V heads, where its layers have one number."""
        kind = self.family.kv_heads
        if kind == "stated":
            return self._count(self.family.kv_heads_keys[0], self.heads)
        if kind == "falcon" and self.config.get("new_decoder_architecture"):
            return self._count("num_kv_heads", self.heads)  # which acts in it only
        if kind == "falcon" and self.config.get("multi_query", True):
            return 1
        return self.heads

    # Shapes

    def _shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, of which heads are counted first in every order of files."""
        if name not in self.entries:
            raise ConfigError(
                f"tensor {name} is missing beside its siblings: the checkpoint is incomplete, "
                "download or copy it again"
            )
        shape = self.entries[name].shape
        if not shape or 0 in shape:
            raise ConfigError(f"tensor {name} has shape {list(shape)}: the checkpoint is damaged")
        return shape[::-1] if self.family.transposed else shape

    def _layer(self, module: str, attention_kind: AttentionKind) -> AttentionLayer:
        """The geometry of a module: the widths of heads follow from query and output projection,
        and the rows of every tensor must fit them.
        """
        family = self.family
        heads, kv_heads = self.heads, self._by_layer.get(_number(module), self.kv_heads)

        # widths
        output = f"{module}.{family.output}.weight"
        shape = self._shape(output)
        value_head_dim, rest = divmod(shape[-1], heads)
        if rest or len(shape) != 2:
            raise ConfigError(
                f"{output} has shape {list(self.entries[output].shape)}, which does not divide "
                f"into {heads} heads ({self.where}): {_APART}"
            )
        key_head_dim = value_head_dim
        if not family.fused:
            rows = self._shape(f"{module}.{family.query}.weight")[0]
            key_head_dim = rows // (heads * family.query_outputs)
        stated = config_value(self.config, family.head_dim_key)
        if stated not in (None, key_head_dim):
            raise ConfigError(
                f"{module} has heads of {key_head_dim} rows, and {self.where} states "
                f"{family.head_dim_key} = {stated}: {_APART}"
            )

        # one float type
        projections = [family.fused] if family.fused else [family.key, family.value]
        names = [f"{module}.{part}.weight" for part in projections]
        dtypes = {self.dtype(name) for name in names if self._shape(name)}
        if len(dtypes) > 1 or not dtypes <= ITEM_BYTES.keys():
            raise UnsupportedFormatError(
                f"{' and '.join(names)} have type {' and '.join(sorted(dtypes))}: save the model "
                "in one float type"
            )
        layer = AttentionLayer(
            module, heads, kv_heads, key_head_dim, value_head_dim, dtypes.pop(), attention_kind
        )

        # rows
        for name, sections in self.sections(layer):
            rows = self._shape(name)[0]
            if rows != sum(section.rows for section in sections):
                words = [f"{s.heads} {s.role} heads of {s.head_rows} rows" for s in sections]
                raise ConfigError(
                    f"{name} has {rows} rows, which contradicts {', '.join(words)} ({self.where}): "
                    f"{_APART}"
                )
        return layer

    def dtype(self, name: str) -> str:
        """The type that a tensor has in the result."""
        return self._result_dtypes.get(name, self.entries[name].dtype)

    # Divisions into heads

    def sections(self, layer: AttentionLayer) -> list[tuple[str, Sections]]:
        """Every tensor of a layer whose rows count heads, with its division into them: the weights,
        then the biases of projections and norms that the checkpoint holds.
        """
        family, kv_heads, head_dim = self.family, layer.kv_heads, layer.key_head_dim
        parts: dict[str, Sections] = {}

        # projections
        has_query = not family.fused or layer.attention_kind == "cross"
        if has_query:
            parts[family.query] = layouts.queries(layer.heads, head_dim, family.query_outputs)
        if family.fused:
            heads = 0 if has_query else layer.heads
            parts[family.fused] = layouts.fused(family.fused_layout, heads, kv_heads, head_dim)
        else:
            parts[family.key] = layouts.separate("key", kv_heads, head_dim)
            parts[family.value] = layouts.separate("value", kv_heads, layer.value_head_dim)

        # gains of keys that are not the same for every head
        if family.key_norm in ("full", "per_head"):
            rows = head_dim if family.key_norm == "full" else 1
            parts[family.key_norm_name] = layouts.separate("key_norm", kv_heads, rows)
        found = []
        for kind in ("weight", "bias"):
            for part, division in parts.items():
                name = f"{layer.module}.{part}.{kind}"
                if name in self.entries:
                    found.append((name, division))
        return found

    def head_list(self, layer: AttentionLayer) -> list[str]:
        """The gains of a norm that has one tensor per K/V head, in the order of heads; empty where
        there is none.
        """
        stem = f"{layer.module}.{self.family.key_norm_name}"
        names = [f"{stem}.{head}.weight" for head in range(layer.kv_heads)]
        if self.family.key_norm != "per_head_list" or names[0] not in self.entries:
            return []
        return [name for name in names if self._shape(name)]


def _number(module: str) -> int:
    return int(next(part for part in module.split(".") if part.isdigit()))
