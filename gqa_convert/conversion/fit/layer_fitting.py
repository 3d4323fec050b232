"""Fits one attention layer on calibration text.

The moments of the *student's* inputs, which the layers below have merged already, decide how the layer's heads are
merged. `fit` then trains the merged projections to yield what the source's attention yields on the same inputs, and
lets the output projection repair as much of what the student's residual stream misses as held-out text confirms.
"""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor

from gqa_convert.conversion.fit.assembly import Assembly, Parts, as_heads, as_parts
from gqa_convert.conversion.fit.fibonacci_search import least
from gqa_convert.conversion.fit.key_trials import KeyTrials
from gqa_convert.conversion.fit.layer_store import LayerRecord, recorded_order
from gqa_convert.conversion.fit.lockstep import Call, CapturedModule, mapped_file
from gqa_convert.conversion.fit.matching import match
from gqa_convert.conversion.fit.options import LOW_FREQUENCY_TOKENS
from gqa_convert.conversion.fit.precision import Precision, is_reduced
from gqa_convert.conversion.fit.progress import OnStage, Stage
from gqa_convert.conversion.fit.source_layer import SourceLayer
from gqa_convert.conversion.fit.statistics import Regression, best_change, moments_of
from gqa_convert.errors import UnsupportedFamilyError
from gqa_convert.merging.attention_heads import Heads
from gqa_convert.merging.head_grouping import find_head_order, reorder_heads
from gqa_convert.merging.merge_layer import Moments, merge_layer

_EXACT, _EXACT_REDUCED = 1e-5, 5e-3
"""The errors below which training would only add noise, in float32 and in bfloat16."""
_HELD_OUT = 8
"""One batch in this many decides between candidates, and nothing is trained on it."""


def judging_batches(count: int) -> range:
    """The numbers of the batches, of `count`, that decide between candidates: the last ones, or a single one that is
    fitted to as well.
    """
    return range(count - max(1, count // _HELD_OUT), count)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """How layers are fitted."""

    groups: int
    """K/V heads of the result."""
    trains: bool
    """Whether to repair the errors of the layers below after the closed form, by refits and the gradient stage."""
    steps: int
    """Of the gradient stage."""
    seed: int
    """Of the order of batches in the gradient stage."""
    spill: Path | None = None
    """A folder for activations; None to keep them in memory."""
    precision: Precision = nullcontext
    """Of the products with activations."""


class _Between(Mapping[int, Tensor]):
    """Targets between two kinds, made one by one so that large ones stay on the disk.

    Args:
        local: the targets at a share of 0.
        whole: the targets at a share of 1.
        share: between both.
    """

    def __init__(self, local: Mapping[int, Tensor], whole: Mapping[int, Tensor], share: float) -> None:
        self._local, self._whole, self._share = local, whole, share

    def __len__(self) -> int:
        return len(self._local)

    def __iter__(self) -> Iterator[int]:
        return iter(self._local)

    def __getitem__(self, number: int) -> Tensor:
        return self._local[number].float().lerp(self._whole[number].float(), self._share)


class LayerFitting:
    """The work on one layer: from `run` on, its source's heads are in the order in which they are merged.

    Args:
        module: the captured module, with the calls of all batches.
        layer: the source's.
        options: how to fit it.
        on_stage: called as stages begin, and at their steps where these are counted.

    Raises:
        UnsupportedFamilyError: the loaded module's parameters are not the checkpoint's tensors.
    """

    def __init__(
        self,
        module: CapturedModule,
        layer: SourceLayer,
        options: FitOptions,
        on_stage: OnStage = lambda stage, step, steps: None,
    ) -> None:
        self.module, self.layer, self.options, self.on_stage = module, layer, options, on_stage
        self.groups, self.constraints = options.groups, layer.constraints
        self._exact = _EXACT_REDUCED if is_reduced(options.precision) else _EXACT
        self.source = layer.layout.split_heads(layer.tensors)
        self.device = next(iter(module.parameters().values())).device
        self.assembly = Assembly(
            layer.layout,
            self.source,
            layer.tensors,
            self.groups,
            self.device,
            repeats_products=is_reduced(options.precision),
        )
        self._check_parameters()
        weight, _ = layer.layout.output_names
        self.projection = weight.removeprefix(f"{layer.layout.layer.module}.").removesuffix(".weight")
        self.biased = self.source.output_bias is not None
        on_stage(Stage.STATISTICS, 0, 0)
        count = len(module.calls)
        # by the number of the batch
        self.calls = {number: student for number, (_, student) in self._numbered()}
        self.local_targets = {number: self._kept(self._run(student)[0]) for number, (_, student) in self._numbered()}
        self.targets = {number: self._kept(self._target(*pair)) for number, pair in self._numbered()}
        self.judged = judging_batches(count)
        self.fitted = range(self.judged.start) or self.judged

    def _numbered(self) -> Iterator[tuple[int, tuple[Call, Call]]]:
        """The calls of source and student by the number of their batch; each pair leaves the resident memory behind it."""
        return enumerate(self.module.calls)

    def _check_parameters(self) -> None:
        own = self.module.parameters()
        step = self.source.groups // self.groups
        shaped = replace(self.source, keys=self.source.keys[::step], values=self.source.values[::step])
        for name, made in self.assembly(as_parts(shaped, self.device)).items():
            if name not in own or own[name].shape != made.shape:
                raise UnsupportedFamilyError(
                    f"transformers holds {self.module.name} otherwise than the checkpoint does ({name}), so that calibration can't fit it: "
                    "choose --method factor without calibration text"
                )

    def run(self) -> tuple[Heads, LayerRecord]:
        """The merged layer, and its record."""
        moments = moments_of(self.module, self.source)
        self.on_stage(Stage.HEAD_ORDER, 0, 0)
        order = find_head_order(self.source, self.groups, self.constraints, moments)
        pooled = self.error(self.pooled(), self.local_targets)  # of neighbours, before heads are reordered
        self.source = reorder_heads(self.source, order)
        self.on_stage(Stage.LOW_FREQUENCY, 0, 0)
        low_frequency = self.low_frequency_pairs(moments)
        merged = merge_layer(self.source, self.groups, self.constraints, moments, low_frequency)
        if self.options.trains:
            merged = self.refitted(self.trained(merged))
        own = self.error(merged, self.local_targets)
        return merged, LayerRecord(
            module=self.module.name,
            head_order=recorded_order(order),
            errors={f"{self.module.name}.output": self.error(merged)},
            gap_left=(own / pooled) ** 2 if pooled else 0.0,
            first_low_frequency_pair=low_frequency,
        )

    def pooled(self) -> Heads:
        """Mean pooling, to compare with."""
        keys, values = (
            array.reshape(self.groups, -1, *array.shape[1:]).mean(1) for array in (self.source.keys, self.source.values)
        )
        return replace(self.source, keys=keys, values=values)

    def low_frequency_pairs(self, moments: Moments) -> int | None:
        """The first rotary pair that is merged as if it had no positions.

        The output of attention with merged keys and the source's values decides, at every distance in the text.
        """
        count = len(self.constraints.pairs[0])
        if self.constraints.key_constraint or not count:
            return None
        tokens = self.calls[0].hidden.shape[:2].numel()
        numbers = range(min(len(self.calls), max(1, LOW_FREQUENCY_TOKENS // tokens)))
        layout, tensors = self.layer.layout, self.layer.tensors
        unmerged = Assembly(layout, self.source, tensors, self.source.groups, self.device)

        trials = KeyTrials(self.source, self.groups, self.constraints, moments)

        def error(low_frequency: int) -> float:
            parameters = unmerged(as_parts(trials.merged(low_frequency), self.device))
            return sum(self._missed(number, parameters, self.local_targets) for number in numbers)

        return least(error, count)

    def trained(self, merged: Heads) -> Heads:
        """The heads after the gradient stage; those given where it does not bring them nearer on held-out text.

        The stage aims at what the source's attention makes of the student's inputs, and at a share of what the
        student's residual stream misses already: the share that the layer can predict on held-out text. In deep models
        it is small, and to fit the rest, which is noise to the layer, would do harm on other text.
        """
        options, parts = self.options, as_parts(merged, self.device)
        if not options.steps or self.error(merged, self.local_targets) < self._exact:
            return merged
        _, share = self._repair(parts)
        targets = _Between(self.local_targets, self.targets, share)
        before = self.error(merged, targets)

        def run(call: Call, parts: Parts) -> Tensor:
            return self.module.run(call, self.assembly(parts))[0]

        on_step = partial(self.on_stage, Stage.GRADIENT)
        found = as_heads(
            match(
                parts,
                run,
                self.calls,
                targets,
                count=len(self.fitted),
                steps=options.steps,
                seed=options.seed,
                precision=options.precision,
                on_step=on_step,
            )
        )
        return found if self.error(found, targets) < before else merged

    def refitted(self, merged: Heads) -> Heads:
        """The heads with a change of the output projection that brings the student's residual stream nearer to the
        source's, as far as held-out text confirms it.
        """
        self.on_stage(Stage.REFIT, 0, 0)
        if self.error(merged) < self._exact:
            return merged
        parts = as_parts(merged, self.device)
        change, _ = self._repair(parts)
        if change is None:
            return merged
        heads, ratio, hidden_size, head_dim = parts["outputs"].shape
        columns = change[: heads * ratio * head_dim].T
        parts["outputs"] = parts["outputs"] + columns.reshape(hidden_size, heads, ratio, head_dim).permute(1, 2, 0, 3)
        if self.biased:
            parts["output_bias"] = parts["output_bias"] + change[-1]
        return as_heads(parts)

    def _repair(self, parts: Parts) -> tuple[Tensor | None, float]:
        """The change of the output projection that repairs most of what the residual stream misses on held-out text, and
        the share of the squared error that it repairs.
        """
        fitted, judged = self._regression(parts, self.fitted), self._regression(parts, self.judged)
        change, whole = best_change(fitted, judged), judged.error(None)
        return change, max(0.0, 1 - judged.error(change) / whole) if whole else 0.0

    def _regression(self, parts: Parts, numbers: range) -> Regression:
        """Of what the student's residual stream misses, on what enters the output projection, over some calls."""
        parameters, found = self.assembly(parts), Regression(self.biased)
        for number, (_, call) in self._numbered():
            if number not in numbers:
                continue
            output, entered = self._run(call, parameters, self.projection)
            assert entered is not None
            found.add(entered, self.targets[number] - output, call.counted)
        return found

    def error(self, merged: Heads, targets: Mapping[int, Tensor] | None = None) -> float:
        """The part of the targets that the layer misses on held-out text, in root mean square; by default those of the
        residual stream.
        """
        targets = self.targets if targets is None else targets
        parameters = self.assembly(as_parts(merged, self.device))
        missed = power = 0.0
        for number in self.judged:
            power += _square(targets[number], self.calls[number])
            missed += self._missed(number, parameters, targets)
        return float(np.sqrt(missed / power)) if power else 0.0

    def _missed(self, number: int, parameters: Mapping[str, Tensor], targets: Mapping[int, Tensor]) -> float:
        """The squared error of the layer on the sequences of one batch."""
        call = self.calls[number]
        return _square(self._run(call, parameters)[0] - targets[number], call)

    def _run(
        self, call: Call, parameters: Mapping[str, Tensor] | None = None, capture: str | None = None
    ) -> tuple[Tensor, Tensor | None]:
        with self.options.precision():
            return self.module.run(call, parameters, capture)

    def _kept(self, target: Tensor) -> Tensor:
        spill = self.options.spill
        if spill is None or target.device.type != "cpu":
            return target
        return mapped_file(spill, target.nbytes).view(target.dtype).reshape(target.shape).copy_(target)

    def _target(self, source: Call, student: Call) -> Tensor:
        """The attention output that makes the student's residual stream equal to the source's."""
        wanted = self._run(source)[0]
        theirs, ours = self.module.residual(source), self.module.residual(student)
        return wanted if theirs is None or ours is None else wanted + theirs - ours


def _square(tensor: Tensor, call: Call) -> float:
    squares = tensor.detach().double().square().sum(-1)
    return float((squares if call.counted is None else squares[call.counted]).sum())
