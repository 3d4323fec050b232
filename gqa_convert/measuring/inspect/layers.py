"""The errors of the closed form in one attention layer, for each number of groups and each pair of heads."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.families.geometry import AttentionFinder, AttentionLayer
from gqa_convert.measuring.inspect.pairs import pair_errors
from gqa_convert.measuring.results.schemas import InspectedLayer, MergeErrors, PairError
from gqa_convert.merging.folding.constraints import find_folding_constraints
from gqa_convert.merging.folding.fitted_error import fitted_errors
from gqa_convert.merging.folding.heads import Heads, LayerTensors, Tensors
from gqa_convert.merging.folding.merge import Moments, merge_layer

Array = npt.NDArray[Any]

PAIRS = 3
"""Number of pairs of heads that are named per layer."""


class LayerInspection:
    """The inspection of one layer.

    Args:
        finder: of the checkpoint.
        layer: one of its layers.
        read: a tensor by its name.
    """

    def __init__(self, finder: AttentionFinder, layer: AttentionLayer, read: Callable[[str], Array]) -> None:
        self.layer = layer
        self.parts = LayerTensors(finder, layer)
        self.tensors: Tensors = {name: read(name) for name in self.parts.names}
        self.heads = self.parts.cut(self.tensors)
        self.constraints = find_folding_constraints(finder, layer)
        self._errors: list[MergeErrors] = []

    def merged(self, groups: Sequence[int], moments: Moments | None) -> Iterator[tuple[int, Heads]]:
        """The layer merged into each number of groups, one in memory at a time; the errors are kept for `record`."""
        for count in groups:
            merged = merge_layer(self.heads, count, self.constraints, moments)
            keys, values = fitted_errors(self.heads, merged, self.constraints, moments)
            self._errors.append(MergeErrors(groups=count, keys=keys, values=values))
            yield count, merged

    def record(self, moments: Moments | None) -> InspectedLayer:
        """The layer's entry in the result, once all merges are done."""
        pairs = [
            (float(np.hypot(keys, values) / np.sqrt(2)), pair, keys, values)
            for pair, (keys, values) in pair_errors(self.heads, self.constraints, moments).items()
        ]
        cheapest = sorted(pairs, key=lambda each: each[0])[:PAIRS]
        return InspectedLayer(
            module=self.layer.module,
            label=self._label(),
            place=self.layer.attention_kind,
            kv_heads=self.layer.kv_heads,
            errors=tuple(self._errors),
            cheapest_pairs=tuple(
                PairError(heads=pair, error=error, keys=keys, values=values) for error, pair, keys, values in cheapest
            ),
            key_barrier=self.constraints.key_constraint,
            value_barrier=self.constraints.value_constraint,
        )

    def _label(self) -> str:
        """The layer's number, and its attention kind unless it is a decoder's self-attention."""
        number = next((part for part in self.layer.module.split(".") if part.isdigit()), self.layer.module)
        return number if self.layer.attention_kind == "decoder" else f"{number} {self.layer.attention_kind}"
