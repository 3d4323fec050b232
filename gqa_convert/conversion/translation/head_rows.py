"""Locates the rows of a layer's heads in the source and orders them as the target architecture expects."""

from gqa_convert.conversion.translation.description import Rows, Run
from gqa_convert.conversion.translation.source_tensors import SourceTensors
from gqa_convert.families.layouts import Role
from gqa_convert.families.source_sizes import Rotary, query_scale, read_rotary


class HeadRows:
    """The heads of one layer.

    Args:
        source: the source tensors of the translation.
        layer: the index of the layer.
    """

    def __init__(self, source: SourceTensors, layer: int) -> None:
        self.source, self.layer, self.size = source, layer, source.dimensions
        rotary = read_rotary(source.config, self.size) if source.origin.interleaved else None
        self.rotated = rotary.rotated if isinstance(rotary, Rotary) else 0

    def runs(self, tensor: str, role: Role) -> tuple[Run, ...]:
        """The rows of every head of a role. K/V heads are merged into `groups` heads, each from consecutive source
        heads.
        """
        size = self.size
        groups = size.heads if role == "query" else self.source.groups
        together = size.heads // groups
        scale = query_scale(self.source.config, size, self.layer) if role == "query" else 1.0
        runs = []
        for first in range(0, size.heads, together):
            starts = [self._start(head, role) for head in range(first, first + together)]
            for offset, step, count in self._order(role):
                sources = tuple(Rows(tensor, start + offset, step) for start in starts)
                pooling = self.source.method.pooling if together > 1 else None
                runs.append(Run(count, sources, pooling, role if pooling else None, scale))
        return tuple(runs)

    def _start(self, head: int, role: Role) -> int:
        """The first row of a head in the source."""
        c, hidden = self.size.head_dim, self.size.hidden_size
        layout = self.source.origin.fused_layout
        if layout == "grouped":
            return (3 * head + ("query", "key", "value").index(role)) * c
        if layout == "quarters":
            block, inside = divmod(head, self.size.heads // 4)
            return (3 * block + ("query", "value", "key").index(role)) * (hidden // 4) + inside * c
        if layout == "blocks":
            return ("query", "key", "value").index(role) * hidden + head * c
        return head * c

    def _order(self, role: Role) -> tuple[tuple[int, int, int], ...]:
        """(first, step, count) of the runs in which a head's rows are read: rotary pairs (2j, 2j + 1) become (j, j +
        rotated/2).
        """
        c, rotated = self.size.head_dim, self.rotated
        if not rotated or role == "value":
            return ((0, 1, c),)
        pairs = ((0, 2, rotated // 2), (1, 2, rotated // 2))
        return (*pairs, (rotated, 1, c - rotated)) if rotated < c else pairs
