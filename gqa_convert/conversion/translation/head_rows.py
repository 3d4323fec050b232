"""Locates the rows of a layer's heads and orders them as the target architecture expects."""

from gqa_convert.conversion.translation.description import Rows, Run
from gqa_convert.conversion.translation.source_tensors import SourceTensors
from gqa_convert.families import layouts
from gqa_convert.families.layouts import Role
from gqa_convert.families.source_sizes import Rotary, query_scale, read_rotary


class HeadRows:
    """The heads of one layer: the source's, or those of the merged layer where the method merges whole layers.

    Args:
        source: the source tensors of the translation.
        layer: the index of the layer.
    """

    def __init__(self, source: SourceTensors, layer: int) -> None:
        self.source, self.layer, self.size = source, layer, source.dimensions
        rotary = read_rotary(source.config, self.size) if source.origin.interleaved else None
        self.rotated = rotary.rotated if isinstance(rotary, Rotary) else 0
        self.merged = source.method.merges_layers and source.groups < self.size.heads
        """Whether the tensors that are read hold the heads of the result already."""

    def runs(self, tensor: str, role: Role) -> tuple[Run, ...]:
        """The rows of every head of a role. K/V heads are merged into `groups` heads, each from consecutive source
        heads.
        """
        starts = self._starts(role)
        groups = self.size.heads if role == "query" else self.source.groups
        together = len(starts) // groups
        scale = query_scale(self.source.config, self.size, self.layer) if role == "query" else 1.0
        runs = []
        for first in range(0, len(starts), together):
            for offset, step, count in self._order(role):
                sources = tuple(Rows(tensor, start + offset, step) for start in starts[first : first + together])
                pooling = self.source.method.pooling if together > 1 else None
                runs.append(Run(count, sources, pooling, scale))
        return tuple(runs)

    def _starts(self, role: Role) -> tuple[int, ...]:
        """The first row of each head of a role in the tensor that holds it."""
        heads, layout = self.size.heads, self.source.origin.fused_layout
        if layout is not None:
            sections = layouts.fused(layout, heads, heads, self.size.head_dim)
        else:
            sections = layouts.separate(role, heads, self.size.head_dim)
        if self.merged and (layout is not None or role != "query"):
            sections = layouts.regrouped(sections, self.source.groups)
        return next(section.starts for section in sections if section.role == role)

    def _order(self, role: Role) -> tuple[tuple[int, int, int], ...]:
        """(first, step, count) of the runs in which a head's rows are read: rotary pairs (2j, 2j + 1) become (j, j +
        rotated/2).
        """
        c, rotated = self.size.head_dim, self.rotated
        if not rotated or role == "value":
            return ((0, 1, c),)
        pairs = ((0, 2, rotated // 2), (1, 2, rotated // 2))
        return (*pairs, (rotated, 1, c - rotated)) if rotated < c else pairs
