"""One attention layer divided into heads, whatever the family's layout, and joined again into the source's tensors.

Shape legend: K source K/V heads, r query heads that read each of them, c head_dim of keys, w head_dim of values,
D hidden size of the layer's output, e inputs of a projection plus one: a bias is the weight of a constant input 1.
"""

from collections.abc import Callable, Iterator
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


class LayerTensors:
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
                self._cuts[query] = layouts.separate("query", layer.heads, layer.key_head_dim * family.query_outputs)
        self._gated = family.query_outputs > 1
        self._output = f"{module}.{family.output}.weight"
        self._output_bias = f"{module}.{family.output}.bias"
        self._biased = self._output_bias in finder.entries
        norms = [name for names in self._lists for name in names]
        self.names = (*self._cuts, *norms, self._output, *((self._output_bias,) if self._biased else ()))
        """Every tensor that a merge may change."""

    @property
    def folding(self) -> dict[str, Literal["query", "output"]]:
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
        """Zeros in place of the projections, with one input and one output: `join` shows with them where each row of
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
                rows = _upright(array, self.transposed).shape[0]
                found[name] = np.zeros(rows if array.ndim == 1 else ((1, rows) if self.transposed else (rows, 1)))
        return found

    def cut(self, tensors: Tensors) -> Heads:
        """The heads, in float64.

        Args:
            tensors: at least those of `names` that are no norms.
        """
        layer = self.layer
        ratio = layer.heads // layer.kv_heads
        found: dict[str, Array] = {}
        for role in ("query", "key", "value"):
            weight = self._role(tensors, role, matrix=True)
            assert weight is not None
            bias = self._role(tensors, role, matrix=False)
            column = np.zeros(weight.shape[:2]) if bias is None else bias
            found[role] = np.concatenate([weight, column[:, :, None]], axis=2, dtype=np.float64)
        queries = found["query"][:, : layer.key_head_dim]
        output = _upright(tensors[self._output], self.transposed).astype(np.float64)  # [D, heads * w]
        columns = output.reshape(len(output), layer.heads, layer.value_head_dim).transpose(1, 0, 2)
        return Heads(
            queries=queries.reshape(layer.kv_heads, ratio, *queries.shape[1:]),
            keys=found["key"],
            values=found["value"],
            outputs=columns.reshape(layer.kv_heads, ratio, *columns.shape[1:]),
            output_bias=tensors[self._output_bias].astype(np.float64) if self._biased else None,
        )

    def join(self, merged: Heads, tensors: Tensors, groups: int) -> Tensors:
        """The layer's tensors with merged heads in the place of the source's: same names, shapes and types.

        Args:
            merged: with `groups` K/V heads, or with as many as the source.
            tensors: the source's. What merging does not change is taken from them; gains of key norms are averaged
                over each group.
            groups: into which the source's heads were merged.
        """
        layer = self.layer
        roles: dict[str, list[Array]] = {
            "query": [query for own in merged.queries for query in own],
            "key": [key for key in merged.keys for _ in range(layer.kv_heads // merged.groups)],
            "value": [value for value in merged.values for _ in range(layer.kv_heads // merged.groups)],
        }
        result: Tensors = {}
        for name, cut in self._cuts.items():
            result[name] = tensors[name].copy()  # keeps a gate beside the queries
            rows = _upright(result[name], self.transposed)
            for section in cut:
                if section.role == "key_norm":
                    heads = list(_averaged(layouts.split(rows, (section,))[0], groups))
                else:
                    heads = [head[:, :-1] if rows.ndim == 2 else head[:, -1] for head in roles[section.role]]
                for start, head in zip(section.starts, heads, strict=True):
                    rows[start : start + len(head)] = head
        for names in self._lists:
            gains = _averaged(np.stack([tensors[name] for name in names]), groups)
            result |= {name: gain.astype(tensors[name].dtype) for name, gain in zip(names, gains, strict=True)}
        columns = np.empty((merged.outputs.shape[2], layer.heads * layer.value_head_dim), tensors[self._output].dtype)
        result[self._output] = _upright(columns, self.transposed)
        for number, head in enumerate(head for own in merged.outputs for head in own):
            columns[:, number * layer.value_head_dim : (number + 1) * layer.value_head_dim] = head
        if self._biased:
            assert merged.output_bias is not None
            result[self._output_bias] = merged.output_bias.astype(tensors[self._output_bias].dtype)
        return result

    def _role(self, tensors: Tensors, role: str, *, matrix: bool) -> Array | None:
        """The rows of all heads of a role, [heads, head_dim, inputs], or [heads, head_dim] of its bias."""
        for name, cut in self._cuts.items():
            array = tensors[name]
            if (array.ndim == 2) == matrix and any(section.role == role for section in cut):
                parts = layouts.split(_upright(array, self.transposed), cut)
                return next(part for section, part in zip(cut, parts, strict=True) if section.role == role)
        return None


def read_layers(finder: AttentionFinder, read: Callable[[str], Array]) -> Iterator[tuple[LayerTensors, Tensors]]:
    """Every attention layer with its tensors, one layer in memory at a time.

    Args:
        finder: of the checkpoint.
        read: a tensor by its name.
    """
    for layer in finder.layers:
        parts = LayerTensors(finder, layer)
        yield parts, {name: read(name) for name in parts.names}


def _upright(array: Array, transposed: bool) -> Array:
    """A weight with rows first, as nn.Linear stores it; Conv1D's weights are transposed, and so back again."""
    return array.T if transposed and array.ndim == 2 else array


def _averaged(gains: Array, groups: int) -> Array:
    """The gains of each head's norm, [heads, ...], as the mean of its group."""
    grouped = (
        gains.astype(np.float64).reshape(groups, -1, *gains.shape[1:])
        if groups < len(gains)
        else gains.astype(np.float64)[:, None]
    )
    return np.asarray(grouped.mean(1).repeat(len(gains) // len(grouped), axis=0))
