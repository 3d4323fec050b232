"""One attention layer split into heads, whatever the family's layout, and merged into tensors
again.

Shape legend: K source K/V heads, N K/V heads of the result, r query heads that read each source
head, c head_dim of keys, w head_dim of values, D hidden size of the layer's output, e inputs of a
projection plus one: a bias is the weight of a constant input 1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from gqa_convert.checkpoint.dtypes import rounded
from gqa_convert.errors import NonFiniteError
from gqa_convert.families import layouts
from gqa_convert.families.geometry import AttentionFinder, AttentionLayer

from .factorisation import Array, on_device

Tensors = dict[str, Array]
"""Tensors by their names in the files."""


@dataclass(frozen=True)
class Heads:
    """An attention layer as arrays. Queries and outputs are sorted by the K/V head that they read.

    Attributes:
        queries: [K, r, c, e].
        keys: [K, c, e]; in cross-attention, e counts the encoder's hidden size.
        values: [K, w, e], with the e of the keys.
        outputs: [K, r, D, w]: the output projection's columns that each query head feeds.
        output_bias: [D], or None where the projection has none.
    """

    queries: Array
    keys: Array
    values: Array
    outputs: Array
    output_bias: Array | None

    @property
    def kv_heads(self) -> int:
        return len(self.keys)

    def each(self, change: Callable[[Array], Array]) -> "Heads":
        """The heads with every array changed, for instance moved to a device."""
        arrays = {name: getattr(self, name) for name in ("queries", "keys", "values", "outputs")}
        changed = {name: change(array) for name, array in arrays.items()}
        bias = None if self.output_bias is None else change(self.output_bias)
        return Heads(**changed, output_bias=bias)


class LayerLayout:
    """Where the heads of one attention layer lie in its tensors.

    Args:
        finder: of the checkpoint.
        layer: one of its layers.

    Attributes:
        names: every tensor that a merge may change.
        output_names: the output projection's weight and its bias, which may be absent.
        projections: the weights and biases that hold heads, and where these lie in their rows.
        dtypes: their types in the result.
        transposed: whether weights are stored with columns first (Conv1D).
    """

    def __init__(self, finder: AttentionFinder, layer: AttentionLayer) -> None:
        self.layer = layer
        self.transposed = finder.family.transposed
        output = f"{layer.module}.{finder.family.output}"
        self.output_names = f"{output}.weight", f"{output}.bias"
        self.projections: dict[str, layouts.Sections] = {}
        gains = finder.head_list(layer)
        self._norms = [(gains, layer.key_head_dim)] if gains else []
        """Of each norm that counts heads: the names of its gains, one for all heads or one for
        each, and the rows of a head.
        """
        for name, sections in finder.sections(layer):
            if sections[0].role == "key_norm":
                self._norms.append(([name], sections[0].head_rows))
            else:
                self.projections[name] = sections
        self.names = [*self.projections]
        for names, _ in self._norms:
            self.names += names
        self.names += [name for name in self.output_names if name in finder.entries]
        self.dtypes = {name: finder.dtype(name) for name in self.names}

    def split_heads(self, tensors: Tensors) -> Heads:
        """The heads of the source, in float64.

        Args:
            tensors: those of `names`; gains of norms are not needed.
        """
        kv_heads = self.layer.kv_heads
        rows: dict[str, Array] = {}
        for name, sections in self.projections.items():  # weights before their biases
            array = rows_first(tensors[name], self.transposed).astype(np.float64)
            for section, heads in zip(sections, layouts.split(array, sections), strict=True):
                if heads.ndim == 3:
                    rows[section.role] = np.pad(heads, ((0, 0), (0, 0), (0, 1)))
                else:
                    rows[section.role][..., -1] = heads
        queries = rows["query"].reshape(kv_heads, -1, *rows["query"].shape[1:])
        weight, bias = self.output_names
        columns = rows_first(tensors[weight], not self.transposed).astype(np.float64)
        outputs = columns.reshape(*queries.shape[:2], self.layer.value_head_dim, -1).swapaxes(2, 3)
        output_bias = tensors[bias].astype(np.float64) if bias in self.names else None
        return Heads(queries, rows["key"], rows["value"], outputs, output_bias)

    def merge_heads(self, merged: Heads, tensors: Tensors, kv_heads: int) -> Tensors:
        """The layer's tensors in the result, in the types of those given, as arrays of the heads'
        library.

        Args:
            merged: with `kv_heads` K/V heads, or with fewer, each of which is then repeated.
            tensors: the source's, or those of a result. A gate beside the queries is taken from
                them, and the gains of key norms, which are averaged over each group.
            kv_heads: N.
        """
        xp = array_namespace(merged.keys)
        rows = {
            "query": merged.queries.reshape(-1, *merged.queries.shape[2:]),
            "key": regroup_heads(merged.keys, kv_heads),
            "value": regroup_heads(merged.values, kv_heads),
        }
        result = self.merge_gains(tensors, kv_heads)
        for name, sections in self.projections.items():
            before = rows_first(tensors[name], self.transposed)
            dtype = getattr(xp, before.dtype.name)
            without_bias: Any = slice(-1) if before.ndim == 2 else -1
            heads = []
            for section in sections:
                if section.role == "gate":
                    heads.append(on_device(layouts.split(before, sections)[1], merged.keys))
                else:
                    heads.append(xp.astype(rows[section.role][..., without_bias], dtype))
            joined = layouts.join(heads, layouts.regrouped(sections, kv_heads))
            result[name] = rows_first(joined, self.transposed)
        weight, bias = self.output_names
        columns = xp.astype(merged.outputs.swapaxes(2, 3), getattr(xp, tensors[weight].dtype.name))
        columns = columns.reshape(-1, columns.shape[-1])
        result[weight] = rows_first(columns, not self.transposed)
        if merged.output_bias is not None:
            result[bias] = xp.astype(merged.output_bias, getattr(xp, tensors[bias].dtype.name))
        return result

    def in_result_types(self, tensors: Tensors) -> Tensors:
        """Tensors of the layer as they are published: rounded once.

        Raises:
            NonFiniteError: one holds NaN, Inf, or a number too large for its type.
        """
        result: Tensors = {}
        for name, array in tensors.items():
            if not np.isfinite(array).all():
                raise NonFiniteError(
                    f"merging gives NaN or Inf in tensor {name}: check the source's weights, "
                    "or try --method mean"
                )
            result[name] = rounded(array, name, self.dtypes[name])
        return result

    def merge_gains(self, tensors: Tensors, kv_heads: int) -> Tensors:
        """The gains of norms that count heads: averaged over each of `kv_heads` groups, or repeated
        for as many heads.
        """
        result: Tensors = {}
        for names, head_rows in self._norms:
            gains = np.concatenate([tensors[name] for name in names if name in tensors])
            gains_by_head = gains.astype(np.float64).reshape(-1, head_rows, *gains.shape[1:])
            regrouped = (
                regroup_heads(gains_by_head, kv_heads)
                .astype(gains.dtype)
                .reshape(-1, *gains.shape[1:])
            )
            result |= zip(names, np.split(regrouped, min(kv_heads, len(names))), strict=False)
        return result


def rows_first(weight: Array, transposed: bool) -> Array:
    """A weight with its rows first, as nn.Linear stores it, or the reverse: Conv1D's are
    transposed, biases never.
    """
    return weight.T if transposed and weight.ndim == 2 else weight


def regroup_heads(heads: Array, kv_heads: int) -> Array:
    """[groups, ...]: means of contiguous heads, or each head as often as the others where there are
    not enough.
    """
    if kv_heads >= len(heads):
        return array_namespace(heads).repeat(heads, kv_heads // len(heads), axis=0)
    return heads.reshape(kv_heads, -1, *heads.shape[1:]).mean(1)
