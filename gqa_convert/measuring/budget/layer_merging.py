"""Merges single layers of copies of the source: by the closed form, or by a short fit."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from gqa_convert.conversion.fit.assembly import repeated_parameters
from gqa_convert.conversion.fit.lockstep import CapturedModule
from gqa_convert.conversion.fit.merged_layers import MergedLayers
from gqa_convert.conversion.fit.precision import Precision
from gqa_convert.conversion.plan import merging_counts
from gqa_convert.families.geometry import AttentionLayer
from gqa_convert.measuring.inspect.layers import LayerInspection
from gqa_convert.measuring.inspect.quick_fit import quick_fitting
from gqa_convert.measuring.inspect.trials import finite_moments, merged_parameters
from gqa_convert.merging.folding.merge import merge_layer


class LayerMerging(Protocol):
    """A way to merge layers."""

    def needs_text(self, merges: Iterable[tuple[str, int]]) -> bool:
        """Whether the source has to run on text for these merges, each of a module into a number of K/V heads."""

    def merge(
        self, inspection: Callable[[], LayerInspection], site: CapturedModule, counts: Sequence[int]
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Merge a layer into each number of K/V heads, one in memory at a time.

        Args:
            inspection: reads the layer.
            site: the source's module, with its calls on the text if it is needed.
            counts: the numbers.

        Yields:
            Each number, and the merged layer as parameters of the source's module, K/V heads repeated.

        Raises:
            UnsupportedFamilyError: the loaded module's parameters are not the checkpoint's tensors.
            NonFiniteError: the source yields NaN or Inf.
        """


class ClosedForm:
    """Merges by the closed form of method `factor`."""

    def needs_text(self, merges: Iterable[tuple[str, int]]) -> bool:
        return any(True for _ in merges)

    def merge(
        self, inspection: Callable[[], LayerInspection], site: CapturedModule, counts: Sequence[int]
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        work = inspection()
        moments = finite_moments(site, work.heads)
        for groups in counts:
            merged = merge_layer(work.heads, groups, work.constraints, moments)
            yield groups, merged_parameters(work, site, merged, groups)


class ShortFits:
    """Merges as `fit` does, on less text and in fewer steps. Each layer is fitted once for each number of K/V heads.

    Args:
        layers: of the source.
        store: keeps the fitted layers.
        steps: of the conversion's gradient stage, of which a short fit takes fewer.
        precision: of the products with activations.
        seed: of the order of batches in gradient steps.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        store: MergedLayers,
        *,
        steps: int,
        precision: Precision,
        seed: int,
    ) -> None:
        merges = ((layer.module, groups) for layer in layers for groups in merging_counts(layer.kv_heads))
        self._numbers = {merge: number for number, merge in enumerate(merges)}
        self._store, self._steps, self._precision, self._seed = store, steps, precision, seed

    def needs_text(self, merges: Iterable[tuple[str, int]]) -> bool:
        return any(self._store.record(self._numbers[merge]) is None for merge in merges)

    def merge(
        self, inspection: Callable[[], LayerInspection], site: CapturedModule, counts: Sequence[int]
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        work = inspection()
        for groups in counts:
            number = self._numbers[site.name, groups]
            if self._store.record(number) is None:
                finite_moments(site, work.heads)
                merged, record = quick_fitting(
                    site, work, groups, self._seed, steps=self._steps, precision=self._precision
                ).run()
                self._store.write(number, work.parts.join(merged, work.tensors, groups), record)
            yield groups, repeated_parameters(work.parts, self._store.read(number), groups)
