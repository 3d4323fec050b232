"""Fits one attention layer on calibration text.

The moments of the *student's* inputs, which the layers below have merged already, decide how the layer's heads are
merged. `fit` then trains the merged projections to yield what the source's attention yields on the same inputs, and
lets the output projection repair as much of what the student's residual stream misses as held-out text confirms.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gqa_convert.checkpoint.heap import kept_heap
from gqa_convert.conversion.fit.attention_calls import (
    AttentionCall,
    CapturedAttention,
    Parameters,
    fitting_parameters,
)
from gqa_convert.conversion.fit.head_parameters import Assembly, Parts, as_heads, as_parts
from gqa_convert.conversion.fit.layer_store import LayerRecord, recorded_order
from gqa_convert.conversion.fit.optimizer import RelativeAdam, batch_order
from gqa_convert.conversion.fit.options import LOW_FREQUENCY_TOKENS
from gqa_convert.conversion.fit.precision import Precision, is_reduced
from gqa_convert.conversion.fit.progress import LayerReport
from gqa_convert.conversion.fit.source_layer import SourceLayer
from gqa_convert.conversion.fit.statistics import Regression, best_change, moments_of
from gqa_convert.conversion.fit.training_attention import TrainingAttention
from gqa_convert.merging.attention_heads import Heads, regroup_heads
from gqa_convert.merging.head_grouping import find_head_order, reorder_heads
from gqa_convert.merging.merge_layer import Moments, merge_layer
from gqa_convert.merging.methods import MergeMethod

RATE = 0.03
"""Of the gradient stage's `RelativeAdam`."""
_EXACT, _EXACT_REDUCED = 1e-5, 5e-3
"""The errors below which training would only add noise, in float32 and in bfloat16."""
_HELD_OUT = 8
"""One batch in this many decides between candidates, and nothing is trained on it."""
_DENT = 2
"""The number of rotary pairs over which the error may rise before it falls further."""


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
    method: MergeMethod
    """After its closed form, one that trains repairs the errors of the layers below, by refits and the gradient stage."""
    steps: int
    """Of the gradient stage."""
    seed: int
    """Of the order of batches in the gradient stage."""
    precision: Precision = nullcontext
    """Of the products with activations."""


class OneLayer:
    """The work on one layer: from `fit` on, its source's heads are in the order in which they are merged.

    Args:
        attention: the module, with its calls in the student.
        layer: the source's.
        options: how to fit it.
        report: of the stages; None for none.

    Raises:
        UnsupportedFamilyError: the loaded module's parameters are not the checkpoint's tensors.
    """

    def __init__(
        self, attention: CapturedAttention, layer: SourceLayer, options: FitOptions, report: LayerReport | None = None
    ) -> None:
        self._attention, self._layer, self._options, self._report = attention, layer, options, report
        self._source = layer.layout.split_heads(layer.tensors)
        self._device = attention.device
        self._exact = _EXACT_REDUCED if is_reduced(options.precision) else _EXACT
        self._assembly = Assembly(layer.layout, layer.tensors, options.groups, self._device)
        judging = judging_batches(len(attention.calls))
        self._judged = [attention.calls[number] for number in judging]
        self._fitted = list(attention.calls[: judging.start]) or self._judged
        fitting_parameters(attention.name, attention.module, self._assembly(self._parts(self._pooled())))

    def fit(self) -> tuple[Heads, LayerRecord]:
        """The merged layer, and its record."""
        options, limits = self._options, self._layer.constraints
        self._tell("statistics")
        moments = moments_of(self._attention.calls)
        self._tell("head order")
        order = find_head_order(self._source, options.groups, limits, moments)
        pooled = self._error(self._pooled(), share=0)  # of neighbours, before heads are reordered
        self._source = reorder_heads(self._source, order)
        self._tell("low-frequency pairs")
        first_low = self._first_low_frequency(moments)
        merged = merge_layer(self._source, options.groups, limits, moments, first_low)
        if options.method.trains:
            merged = self._refitted(self._trained(merged))
        own = self._error(merged, share=0)
        return merged, LayerRecord(
            module=self._attention.name,
            head_order=recorded_order(order),
            errors={f"{self._attention.name}.output": self._error(merged, share=1)},
            gap_left=(own / pooled) ** 2 if pooled else 0.0,
            first_low_frequency_pair=first_low,
        )

    def _tell(self, stage: str, step: int = 0, steps: int = 0) -> None:
        if self._report is not None:
            self._report.stage(stage, step, steps)

    def _parts(self, heads: Heads) -> dict[str, Tensor]:
        return as_parts(heads, self._device)

    def _run(self, call: AttentionCall, parameters: Parameters) -> tuple[Tensor, Tensor]:
        with self._options.precision():
            return self._attention.run(call, parameters)

    def _error(self, merged: Heads, share: float) -> float:
        """The part of a target that the layer misses on held-out text, in root mean square; see `AttentionCall.between`
        for the target.
        """
        power = sum(float(call.square(call.between(share).double())) for call in self._judged)
        missed = self._missed(self._judged, self._assembly(self._parts(merged)), share)
        return float(np.sqrt(missed / power)) if power else 0.0

    def _missed(self, calls: Iterable[AttentionCall], parameters: Parameters, share: float) -> float:
        """The squared error of the layer in some calls."""
        missed = 0.0
        for call in calls:
            output, _ = self._run(call, parameters)
            missed += float(call.square((output - call.between(share)).double()))
        return missed

    def _pooled(self) -> Heads:
        """Mean pooling, to compare with."""
        source, groups = self._source, self._options.groups
        return replace(source, keys=regroup_heads(source.keys, groups), values=regroup_heads(source.values, groups))

    def _first_low_frequency(self, moments: Moments) -> int | None:
        """The first rotary pair that is merged as if it had no positions.

        The output of attention with merged keys and the source's values decides, at every distance in the text. Trials
        are merged in float32, which takes half the time.
        """
        source, limits = self._source, self._layer.constraints
        if limits.key_constraint or not len(limits.pairs[0]):
            return None
        first = self._attention.calls[0].hidden
        calls = self._attention.calls[: max(1, LOW_FREQUENCY_TOKENS // first.shape[:2].numel())]
        unmerged = Assembly(self._layer.layout, self._layer.tensors, source.groups, self._device)
        keys_alone = replace(limits, value_constraint="values are not looked at")
        rough = replace(source, queries=source.queries.astype(np.float32), keys=source.keys.astype(np.float32))
        rough_moments = Moments(np.asarray(moments.queries, np.float32), np.asarray(moments.keys, np.float32))

        def error(first_low: int) -> float:
            merged = merge_layer(rough, self._options.groups, keys_alone, rough_moments, first_low)
            keys = regroup_heads(merged.keys, source.groups)
            trial = replace(source, queries=merged.queries, keys=keys)
            return self._missed(calls, unmerged(self._parts(trial)), share=0)

        return least(error, len(limits.pairs[0]))

    def _trained(self, merged: Heads) -> Heads:
        """The heads after the gradient stage; those given where it does not bring them nearer on held-out text.

        The stage aims at what the source's attention makes of the student's inputs, and at a share of what the
        student's residual stream misses already: the share that the layer can predict on held-out text. In deep models
        it is small, and to fit the rest, which is noise to the layer, would do harm on other text.
        """
        if not self._options.steps or self._error(merged, share=0) < self._exact:
            return merged
        parts = self._parts(merged)
        _, share = self._repair(parts)
        found = as_heads(self._after_steps(parts, share))
        return found if self._error(found, share) < self._error(merged, share) else merged

    def _after_steps(self, parts: Parts, share: float) -> dict[str, Tensor]:
        """Adam on the squared error of attention's output."""
        steps, calls = self._options.steps, self._fitted
        optimizer = RelativeAdam([parts], RATE, steps)
        power = sum(float(call.between(share).double().square().sum()) for call in calls)
        mean_square = power / sum(call.output.numel() for call in calls)
        with kept_heap(self._device):
            for done, number in enumerate(batch_order(len(calls), steps, self._options.seed)):
                self._tell("gradient steps", done, steps)
                call = calls[number]
                target = call.between(share)
                numbers = target.shape[-1] * (target[..., 0].numel() if call.counted is None else call.counted.sum())
                with torch.enable_grad(), TrainingAttention():
                    output, _ = self._run(call, self._assembly(optimizer.parts()[0]))
                    missed = call.square(output.float() - target)
                    torch.autograd.backward(missed / (numbers * mean_square or 1.0))
                optimizer.step()
        return optimizer.results()[0]

    def _refitted(self, merged: Heads) -> Heads:
        """The heads with a change of the output projection that brings the student's residual stream nearer to the
        source's, as far as held-out text confirms it.
        """
        self._tell("refit")
        if self._error(merged, share=1) < self._exact:
            return merged
        parts = self._parts(merged)
        change, _ = self._repair(parts)
        if change is None:
            return merged
        heads, ratio, hidden_size, head_dim = parts["outputs"].shape
        columns = change[: heads * ratio * head_dim].T
        parts["outputs"] = parts["outputs"] + columns.reshape(hidden_size, heads, ratio, head_dim).permute(1, 2, 0, 3)
        if "output_bias" in parts:
            parts["output_bias"] = parts["output_bias"] + change[-1]
        return as_heads(parts)

    def _repair(self, parts: Parts) -> tuple[Tensor | None, float]:
        """The change of the output projection that repairs most of what the residual stream misses on held-out text, and
        the share of the squared error that it repairs.
        """
        parameters = self._assembly(parts)
        return best_change(self._regression(parameters, self._fitted), self._regression(parameters, self._judged))

    def _regression(self, parameters: Parameters, calls: Iterable[AttentionCall]) -> Regression:
        """Of what the student's residual stream misses, on what enters the output projection, in some calls."""
        found = Regression(biased=self._source.output_bias is not None)
        for call in calls:
            output, entered = self._run(call, parameters)
            found.add(entered, call.target - output, call.counted)
        return found


def least(error: Callable[[int], float], count: int) -> int:
    """The number from 0 to `count` with the least error, by steps that halve.

    The error must fall towards one point and rise behind it, except for dents of up to `_DENT` numbers.
    """
    seen: dict[int, float] = {}

    def at(number: int) -> float:
        if number not in seen:
            seen[number] = error(number)
        return seen[number]

    def best_of(numbers: Iterable[int]) -> int:
        return min((number for number in numbers if 0 <= number <= count), key=at)

    best, step = count // 2, (count + 2) // 4
    while step:
        best = best_of((best, best - step, best + step))
        step //= 2
    while True:
        better = best_of(range(best - _DENT, best + _DENT + 1))
        if better == best:
            return best
        best = better
