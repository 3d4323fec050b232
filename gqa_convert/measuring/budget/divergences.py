"""Measures how far copies of the source with merged layers diverge from it on held-out text, all in lockstep."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, Final

from gqa_convert.conversion.fit.lockstep import Batch, CapturedModule, LockstepRunner
from gqa_convert.conversion.fit.precision import Precision
from gqa_convert.conversion.plan import merging_counts
from gqa_convert.families.geometry import AttentionLayer
from gqa_convert.measuring.budget.kept import Copy, KeptDivergences
from gqa_convert.measuring.budget.layer_merging import LayerMerging
from gqa_convert.measuring.inspect.layers import LayerInspection
from gqa_convert.measuring.inspect.losses import divergence

COPIES: Final = 64
"""Maximum number of copies of the source whose activations are in memory together while layers are merged alone."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The loaded source, and the text that its copies are merged and measured on.

    Attributes:
        model: the loaded source.
        layers: its attention layers.
        inspection: reads a layer.
        text: batches on which layers are merged.
        held_out: batches for the divergences.
        merging: how layers are merged.
        precision: of forward passes.
    """

    model: Any
    layers: Sequence[AttentionLayer]
    inspection: Callable[[AttentionLayer], LayerInspection]
    text: Sequence[Batch]
    held_out: Sequence[Batch]
    merging: LayerMerging
    precision: Precision = nullcontext


def measure_divergences(
    subject: Subject, copies: Sequence[Copy], batches: int | None, progress: Callable[[int], None]
) -> list[float]:
    """The KL divergence of each copy from the source in nats per token; infinite where a copy yields NaN or Inf.

    Args:
        subject: the source and the text.
        copies: what to measure. All are in memory together, as the activations of one pass over the held-out batches.
        batches: how many held-out batches to measure on; None for all.
        progress: called with the number of layers that all copies have passed.

    Raises:
        UnsupportedFamilyError: the loaded modules' parameters are not the checkpoint's tensors.
        NonFiniteError: a layer of the source gets or gives NaN or Inf.
    """
    by_name = {layer.module: layer for layer in subject.layers}
    held_out = subject.held_out[:batches]
    with ExitStack() as stack:

        def run(text: Sequence[Batch]) -> LockstepRunner:
            return stack.enter_context(
                LockstepRunner(subject.model, text, list(by_name), paired=False, precision=subject.precision)
            )

        needs_text = subject.merging.needs_text({merge for copy in copies for merge in copy.items()})
        source, students = run(held_out), [run(held_out) for _ in copies]
        measured = run(subject.text) if needs_text else repeat(None, len(by_name))
        for done, (on_text, site, *captured) in enumerate(zip(measured, source, *students, strict=True), start=1):
            receivers: dict[int, list[CapturedModule]] = {}
            for copy, module in zip(copies, captured, strict=True):
                if site.name in copy:
                    receivers.setdefault(copy[site.name], []).append(module)
            if receivers:
                inspection = partial(subject.inspection, by_name[site.name])
                for groups, parameters in subject.merging.merge(inspection, on_text or site, list(receivers)):
                    for module in receivers[groups]:
                        module.commit(parameters)
            progress(done)
        return _divergences(source, students)


class Measurer:
    """Measures divergences and keeps them; what was kept by an earlier run is not measured again.

    Args:
        subject: opens the source and the text, once something has to be measured.
        layers: the number of the source's layers.
        kept: the divergences.
    """

    def __init__(self, subject: Callable[[], Subject], layers: int, kept: KeptDivergences) -> None:
        self._subject, self._layers, self._kept = subject, layers, kept

    def measure(self, copies: Sequence[Copy], batches: int | None, progress: Callable[[int, int], None]) -> list[float]:
        """The divergence of each copy, as `measure_divergences`.

        Args:
            copies: what to measure, a limited number of them in memory together.
            batches: how many held-out batches to measure on; None for all.
            progress: called with the number of layers that the copies of all passes have passed, and that of all.

        Raises:
            UnsupportedFamilyError, NonFiniteError: as `measure_divergences`.
        """
        missing = [copy for copy in copies if self._kept.find(copy, batches) is None]
        chunks = [missing[first : first + COPIES] for first in range(0, len(missing), COPIES)]
        total = len(chunks) * self._layers
        for number, chunk in enumerate(chunks):

            def report(done: int, before: int = number * self._layers) -> None:
                progress(before + done, total)

            self._kept.add(chunk, batches, measure_divergences(self._subject(), chunk, batches, report))
        return [kl for copy in copies if (kl := self._kept.find(copy, batches)) is not None]


def measure_costs(
    measurer: Measurer, layers: Sequence[AttentionLayer], progress: Callable[[int, int], None]
) -> dict[str, dict[int, float]]:
    """The divergence with one layer alone merged, on the first held-out batch: for each layer's module, by each smaller
    number of K/V heads that divides its own.

    Args:
        measurer: of the source.
        layers: the layers to merge.
        progress: as for `Measurer.measure`.

    Raises:
        UnsupportedFamilyError, NonFiniteError: as `measure_divergences`.
    """
    trials = [(layer.module, groups) for layer in layers for groups in merging_counts(layer.kv_heads)[:-1]]
    found = measurer.measure([{module: groups} for module, groups in trials], 1, progress)
    costs: dict[str, dict[int, float]] = {layer.module: {} for layer in layers}
    for (module, groups), cost in zip(trials, found, strict=True):
        costs[module][groups] = cost
    return costs


def _divergences(source: LockstepRunner, students: Sequence[LockstepRunner]) -> list[float]:
    totals, tokens = [0.0] * len(students), 0
    predictions = [student.logits() for student in students]
    for theirs, _ in source.logits():
        tokens += theirs.shape[0] * theirs.shape[1]
        for place, each in enumerate(predictions):
            ours, _ = next(each)
            totals[place] += sum(divergence(*block) * len(block[0]) for block in zip(ours, theirs, strict=True))
    # rounding can make the divergence of an equal copy slightly negative
    return [max(0.0, total / tokens) if math.isfinite(total) else math.inf for total in totals]
