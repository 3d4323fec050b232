"""Reads one attention module as heads in float64, from tensors in the layout of SOURCE or of OUT.

Shape legend: K K/V heads, r query heads per K/V head, c head_dim of keys, w head_dim of values, D outputs of the module,
e inputs of a projection plus one that is always 1 and whose weights are the bias.
"""

from dataclasses import dataclass
from typing import Any

from gqa_convert.families.family import Family
from gqa_convert.verify.checkpoint_reader import Weights
from gqa_convert.verify.geometry import AttentionKind, Counts
from gqa_convert.verify.layout import Run, axis_of, fused, separate
from gqa_convert.verify.numbers import rounding

Role = str
"""query, key, value or output."""


@dataclass(frozen=True)
class Heads:
    """The heads of an attention module as torch tensors. Queries and outputs are sorted by their K/V head."""

    queries: Any
    """[K, r, c, e]."""
    keys: Any
    """[K, c, e]."""
    values: Any
    """[K, w, e]."""
    outputs: Any
    """[K, r, D, w]: columns of the output projection."""
    noise: dict[Role, Any]
    """The squared error that rounding to the checkpoint's type may have made, summed over each row of queries
    [K, r, c], keys [K, c] and values [K, w] and over each column of outputs [K, r, w]."""

    @property
    def count(self) -> int:
        """K."""
        return int(self.keys.shape[0])

    def ordered(self, order: list[int]) -> "Heads":
        """These heads with K/V heads, and the queries and outputs that belong to them, in another order."""
        noise = {role: each[order] for role, each in self.noise.items()}
        return Heads(self.queries[order], self.keys[order], self.values[order], self.outputs[order], noise)

    def regrouped(self, heads: int) -> "Heads":
        """These heads with every K/V head repeated, so that there are `heads` K/V heads."""
        times = heads // self.count
        return Heads(
            queries=self.queries.flatten(0, 1).unflatten(0, (heads, -1)),
            keys=self.keys.repeat_interleave(times, 0),
            values=self.values.repeat_interleave(times, 0),
            outputs=self.outputs.flatten(0, 1).unflatten(0, (heads, -1)),
            noise={
                role: noise.repeat_interleave(times, 0)
                if role in ("key", "value")
                else noise.flatten(0, 1).unflatten(0, (heads, -1))
                for role, noise in self.noise.items()
            },
        )


class HeadReader:
    """Reads the attention modules of a checkpoint.

    Args:
        weights: the checkpoint's tensors.
        family: SOURCE's family.
        converted: whether the checkpoint is OUT, whose fused projections are [q | k | v].
    """

    def __init__(self, weights: Weights, family: Family, *, converted: bool) -> None:
        self._weights = weights
        self._family = family
        self._converted = converted

    def read(self, module: str, attention_kind: AttentionKind, counts: Counts) -> Heads:
        """A module's heads.

        Args:
            module: the module's name.
            attention_kind: the module's kind of attention.
            counts: the numbers of its heads.
        """
        import torch

        heads = counts.after if self._converted else counts.before
        found: dict[Role, Any] = {}
        noise: dict[Role, Any] = {}
        for role in ("query", "key", "value"):
            matrix, matrix_noise = self._role(module, attention_kind, counts, role, "weight")
            column, column_noise = self._role(module, attention_kind, counts, role, "bias")
            if column is None:
                column, column_noise = matrix.new_zeros(matrix.shape[:2]), 0.0
            found[role] = torch.cat([matrix, column[:, :, None]], 2)
            noise[role] = matrix_noise.square().sum(2) + column_noise**2
        weight = self._weights.whole(f"{module}.{self._family.output}.weight")
        columns = (weight.T if self._family.transposed else weight).double()  # [D, heads * w]
        columns = columns.unflatten(1, (counts.heads, -1)).transpose(0, 1)
        off = rounding(columns, weight.dtype).square().sum(1)
        return Heads(
            queries=found["query"].unflatten(0, (heads, -1)),
            keys=found["key"],
            values=found["value"],
            outputs=columns.unflatten(0, (heads, -1)),
            noise={
                "query": noise["query"].unflatten(0, (heads, -1)),
                "key": noise["key"],
                "value": noise["value"],
                "output": off.unflatten(0, (heads, -1)),
            },
        )

    def gates(self, module: str, counts: Counts) -> dict[str, Any]:
        """The rows of the query projection that are gates, not queries, by tensor."""
        found = {}
        for kind in ("weight", "bias"):
            name = f"{module}.{self._family.query}.{kind}"
            if self._family.query_outputs > 1 and name in self._weights.file_of:
                rows = self._weights.whole(name).unflatten(0, (counts.heads, -1))
                found[name] = rows[:, rows.shape[1] // self._family.query_outputs :].contiguous()
        return found

    def _role(
        self, module: str, attention_kind: AttentionKind, counts: Counts, role: Role, kind: str
    ) -> tuple[Any, Any]:
        """The rows [heads, rows, (inputs)] of a role and the bounds of their rounding errors; None if the module has no
        such tensor.
        """
        import torch

        family = self._family
        heads = counts.heads if role == "query" else counts.after if self._converted else counts.before
        together = family.fused is not None and not (role == "query" and attention_kind == "cross")
        name = f"{module}.{family.fused if together else getattr(family, role)}.{kind}"
        if name not in self._weights.file_of:
            return None, None
        tensor = self._weights.whole(name)
        if axis_of(family, tuple(tensor.shape)):
            tensor = tensor.T
        if together:
            run = next(run for run in self._runs(attention_kind, counts, len(tensor)) if run.part == role)
        else:
            run = separate("query", heads, len(tensor) // heads)[0]
        # the gates of a head follow its queries
        head_dim = run.head_dim // family.query_outputs if role == "query" else run.head_dim
        rows = torch.stack([tensor[start : start + head_dim] for start in run.starts])
        return rows.double(), rounding(rows.double(), tensor.dtype)

    def _runs(self, attention_kind: AttentionKind, counts: Counts, rows: int) -> tuple[Run, ...]:
        heads = 0 if attention_kind == "cross" else counts.heads
        groups = counts.after if self._converted else counts.before
        layout = "blocks" if self._converted and counts.before != counts.after else self._family.fused_layout
        return fused(layout, heads, groups, rows // (heads + 2 * groups))
