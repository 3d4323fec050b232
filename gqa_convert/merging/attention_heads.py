"""One attention layer divided into heads, whatever the family's layout, and joined again into tensors.

Shape legend: K source K/V heads, N K/V heads of the result, r query heads that read each source head, c head_dim of
keys, w head_dim of values, D hidden size of the layer's output, e inputs of a projection plus one: a bias is the weight
of a constant input 1.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gqa_convert.families import layouts
from gqa_convert.families.geometry import AttentionFinder, AttentionLayer
from gqa_convert.families.layouts import Section

Array = npt.NDArray[Any]
Tensors = dict[str, Array]
"""Tensors by their names in the files."""


@dataclass(frozen=True)
class Heads:
    """An attention layer as arrays. Queries and outputs are sorted by the K/V head that they read."""

    queries: Array
    """[K, r, c, e]."""
    keys: Array
    """[K, c, e]; in cross-attention, e counts the encoder's hidden size."""
    values: Array
    """[K, w, e], with the e of the keys."""
    outputs: Array
    """[K, r, D, w]: the output projection's columns that each query head feeds."""
    output_bias: Array | None
    """[D], or None where the projection has none."""

    @property
    def groups(self) -> int:
        return len(self.keys)

    def repeated(self, heads: int) -> "Heads":
        """The same function with each merged head repeated once for every head that it replaces.

        Args:
            heads: K/V heads of the result, a multiple of `groups`; queries and outputs are sorted by them already.
        """
        times = heads // self.groups
        return replace(self, keys=self.keys.repeat(times, axis=0), values=self.values.repeat(times, axis=0))


class LayerLayout:
    """The tensors of one attention layer, and where heads lie in them.

    Args:
        finder: of the checkpoint.
        layer: one of its layers.
    """

    def __init__(self, finder: AttentionFinder, layer: AttentionLayer) -> None:
        self.layer = layer
        self.transposed = finder.family.transposed
        family, module = finder.family, layer.module
        self._cuts: dict[str, tuple[Section, ...]] = dict(finder.sections(layer))
        self._lists = list(finder.head_lists(layer))
        for kind in ("weight", "bias"):
            query = f"{module}.{family.query}.{kind}"
            if query in finder.entries and (not family.fused or layer.attention_kind == "cross"):
                [queries] = layouts.separate("query", layer.heads, layer.key_head_dim * family.query_outputs)
                self._cuts[query] = (replace(queries, merged=False),)
        self._output = f"{module}.{family.output}.weight"
        self._output_bias = f"{module}.{family.output}.bias"
        self._biased = self._output_bias in finder.entries
        norms = [name for names in self._lists for name in names]
        self.names = (*self._cuts, *norms, self._output, *((self._output_bias,) if self._biased else ()))
        """Every tensor that a merge may change."""

    @property
    def absorbing(self) -> dict[str, Literal["query", "output"]]:
        """Tensors into which maps are folded and that hold no K/V heads, each with what it holds."""
        found: dict[str, Literal["query", "output"]] = {
            name: "query" for name, cut in self._cuts.items() if [section.role for section in cut] == ["query"]
        }
        return found | {name: "output" for name in (self._output, self._output_bias) if name in self.names}

    @property
    def output_names(self) -> tuple[str, str]:
        """The names of the output projection's weight and of its bias, which may be absent."""
        return self._output, self._output_bias

    def is_norm(self, name: str) -> bool:
        """Whether a tensor holds the gains of a norm that counts K/V heads."""
        return any(name in names for names in self._lists) or any(
            section.role == "key_norm" for section in self._cuts.get(name, ())
        )

    def narrowed(self, tensors: Tensors) -> Tensors:
        """Zeros in place of the projections, with one input and one output: `merge_heads` shows with them where each row of
        the heads goes.
        """
        found: Tensors = {}
        for name in self.names:
            array = tensors[name]
            if self.is_norm(name):
                found[name] = array.astype(np.float64)
            elif name in (self._output, self._output_bias):
                found[name] = np.zeros((1,) * array.ndim)
            else:
                rows = rows_first(array, self.transposed).shape[0]
                found[name] = np.zeros(rows if array.ndim == 1 else ((1, rows) if self.transposed else (rows, 1)))
        return found

    def split_heads(self, tensors: Tensors, groups: int | None = None) -> Heads:
        """The heads, in float64: keys and values [K, ...] of the source, [N, ...] of a result.

        Args:
            tensors: at least those of `names` that are no norms.
            groups: N, where the tensors are those of a result; None where they are the source's.
        """
        layer = self.layer
        ratio = layer.heads // layer.kv_heads
        found: dict[str, Array] = {}
        for role in ("query", "key", "value"):
            weight = self._role(tensors, role, groups, matrix=True)
            assert weight is not None
            bias = self._role(tensors, role, groups, matrix=False)
            column = np.zeros(weight.shape[:2]) if bias is None else bias
            found[role] = np.concatenate([weight, column[:, :, None]], axis=2, dtype=np.float64)
        queries = found["query"][:, : layer.key_head_dim]
        output = rows_first(tensors[self._output], self.transposed).astype(np.float64)  # [D, heads * w]
        columns = output.reshape(len(output), layer.heads, layer.value_head_dim).transpose(1, 0, 2)
        return Heads(
            queries=queries.reshape(layer.kv_heads, ratio, *queries.shape[1:]),
            keys=found["key"],
            values=found["value"],
            outputs=columns.reshape(layer.kv_heads, ratio, *columns.shape[1:]),
            output_bias=tensors[self._output_bias].astype(np.float64) if self._biased else None,
        )

    def merge_heads(self, merged: Heads, tensors: Tensors, groups: int) -> Tensors:
        """The layer's tensors in the result, in the types of the source's.

        Args:
            merged: with `groups` K/V heads, or with fewer, each of which is then repeated.
            tensors: the source's. A gate beside the queries is taken from them, and the gains of key norms, which are
                averaged over each group.
            groups: N.
        """
        layer = self.layer
        heads: dict[str, Array] = {
            "query": merged.queries.reshape(layer.heads, *merged.queries.shape[2:]),
            "key": _resized(merged.keys, groups),
            "value": _resized(merged.values, groups),
        }
        result: Tensors = {}
        for name, cut in self._cuts.items():
            source = rows_first(tensors[name], self.transposed)
            sections = self._layout(cut, groups)
            rows = np.empty((sum(section.rows for section in sections), *source.shape[1:]), source.dtype)
            for section, before in zip(sections, layouts.split(source, cut), strict=True):
                if section.role == "key_norm":
                    after = _averaged(before, groups)
                else:
                    after = heads[section.role][:, :, :-1] if rows.ndim == 2 else heads[section.role][:, :, -1]
                for number, start in enumerate(section.starts):
                    if section.role == "query":
                        rows[start : start + section.head_rows] = before[number]  # the gate
                    rows[start : start + after.shape[1]] = after[number]
            result[name] = rows_first(rows, self.transposed)
        for names in self._lists:
            gains = _averaged(np.stack([tensors[name] for name in names]), groups)
            result |= {name: gain.astype(tensors[name].dtype) for name, gain in zip(names[:groups], gains, strict=True)}
        columns = np.empty((merged.outputs.shape[2], layer.heads * layer.value_head_dim), tensors[self._output].dtype)
        result[self._output] = rows_first(columns, self.transposed)
        for number, head in enumerate(head for own in merged.outputs for head in own):
            columns[:, number * layer.value_head_dim : (number + 1) * layer.value_head_dim] = head
        if self._biased:
            assert merged.output_bias is not None
            result[self._output_bias] = merged.output_bias.astype(tensors[self._output_bias].dtype)
        return result

    def repeated(self, tensors: Tensors, groups: int) -> Tensors:
        """The tensors of a result as the source's own module holds them: its K heads, each that of its group.

        Args:
            tensors: what `merge_heads` returned.
            groups: N.
        """
        count = self.layer.kv_heads
        result = dict(tensors)
        for name, cut in self._cuts.items():
            found = layouts.split(rows_first(tensors[name], self.transposed), self._layout(cut, groups))
            heads = [_resized(own, section.heads) for section, own in zip(cut, found, strict=True)]
            result[name] = rows_first(layouts.join(heads, cut), self.transposed)
        for names in self._lists:
            gains = _resized(np.stack([tensors[name] for name in names[:groups]]), count)
            result |= dict(zip(names, gains, strict=True))
        return result

    def _layout(self, cut: tuple[Section, ...], groups: int | None) -> tuple[Section, ...]:
        """The layout of a tensor with `groups` K/V heads; the source's where their number does not change."""
        return cut if groups is None or groups == self.layer.kv_heads else layouts.regrouped(cut, groups)

    def _role(self, tensors: Tensors, role: str, groups: int | None, *, matrix: bool) -> Array | None:
        """The rows of all heads of a role, [heads, head_dim, inputs], or [heads, head_dim] of its bias."""
        for name, cut in self._cuts.items():
            array = tensors[name]
            if (array.ndim == 2) == matrix and any(section.role == role for section in cut):
                parts = layouts.split(rows_first(array, self.transposed), self._layout(cut, groups))
                return next(part for section, part in zip(cut, parts, strict=True) if section.role == role)
        return None


def rows_first(array: Array, transposed: bool) -> Array:
    """A weight with rows first, as nn.Linear stores it; Conv1D's weights are transposed, and so back again."""
    return array.T if transposed and array.ndim == 2 else array


def _resized(heads: Array, count: int) -> Array:
    """`count` heads from another number of them, [heads, ...]: each repeated, or the first of each run of equal ones."""
    return heads if len(heads) == count else heads[np.arange(count) * len(heads) // count]


def _averaged(gains: Array, groups: int) -> Array:
    """The gains of each group's norm, [N, ...], as the mean of its heads', [K, ...]; repeated where N exceeds K."""
    wide = gains.astype(np.float64)
    return _resized(wide.reshape(min(groups, len(wide)), -1, *wide.shape[1:]).mean(1), groups)
