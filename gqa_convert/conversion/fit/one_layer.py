"""Fits one attention layer on calibration text.

The moments of the *student's* inputs, which the layers below have merged already, decide how the layer's heads are
merged. `fit` then trains the merged projections to yield what the source's attention yields on the same inputs, and
lets the output projection repair as much of what the student's residual stream misses as held-out text confirms.
"""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from torch import Tensor

from gqa_convert.conversion.fit.attention_calls import AttentionCall, CapturedAttention, fitting_parameters
from gqa_convert.conversion.fit.fit_gradient import fit_gradient
from gqa_convert.conversion.fit.head_parameters import Assembly, Parts, as_heads, as_parts
from gqa_convert.conversion.fit.layer_store import LayerRecord, recorded_order
from gqa_convert.conversion.fit.low_frequency_search import KeyTrials, least
from gqa_convert.conversion.fit.options import LOW_FREQUENCY_TOKENS
from gqa_convert.conversion.fit.precision import Precision, is_reduced
from gqa_convert.conversion.fit.progress import OnStage, Stage
from gqa_convert.conversion.fit.source_layer import SourceLayer
from gqa_convert.conversion.fit.statistics import Regression, best_change, moments_of
from gqa_convert.merging.attention_heads import Heads
from gqa_convert.merging.head_grouping import find_head_order, reorder_heads
from gqa_convert.merging.merge_layer import Moments, merge_layer
from gqa_convert.merging.methods import MergeMethod

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
        on_stage: called as stages begin, and at their steps where these are counted.

    Raises:
        UnsupportedFamilyError: the loaded module's parameters are not the checkpoint's tensors.
    """

    def __init__(
        self,
        attention: CapturedAttention,
        layer: SourceLayer,
        options: FitOptions,
        on_stage: OnStage = lambda stage, step, steps: None,
    ) -> None:
        self.attention, self.layer, self.options, self.on_stage = attention, layer, options, on_stage
        self.source = layer.layout.split_heads(layer.tensors)
        self.device = attention.device
        reduced = is_reduced(options.precision)
        self.exact = _EXACT_REDUCED if reduced else _EXACT
        self.assembly = Assembly(layer.layout, layer.tensors, options.groups, self.device, repeats_products=reduced)
        self.judged = judging_batches(len(attention.calls))
        self.fitted = range(self.judged.start) or self.judged
        fitting_parameters(attention.name, attention.module, self.assembly(as_parts(self._pooled(), self.device)))

    def fit(self) -> tuple[Heads, LayerRecord]:
        """The merged layer, and its record."""
        options, limits = self.options, self.layer.constraints
        self.on_stage(Stage.STATISTICS, 0, 0)
        moments = moments_of(self.attention.calls, self.source)
        self.on_stage(Stage.HEAD_ORDER, 0, 0)
        order = find_head_order(self.source, options.groups, limits, moments)
        pooled = self.error(self._pooled(), share=0)  # of neighbours, before heads are reordered
        self.source = reorder_heads(self.source, order)
        self.on_stage(Stage.LOW_FREQUENCY, 0, 0)
        first_low = self._first_low_frequency(moments)
        merged = merge_layer(self.source, options.groups, limits, moments, first_low)
        if options.method.trains:
            merged = self._refitted(self._trained(merged))
        own = self.error(merged, share=0)
        return merged, LayerRecord(
            module=self.attention.name,
            head_order=recorded_order(order),
            errors={f"{self.attention.name}.output": self.error(merged, share=1)},
            gap_left=(own / pooled) ** 2 if pooled else 0.0,
            first_low_frequency_pair=first_low,
        )

    def error(self, merged: Heads, share: float) -> float:
        """The part of a target that the layer misses on held-out text, in root mean square.

        Args:
            merged: the heads.
            share: of the target: see `AttentionCall.between`.
        """
        calls = [self.attention.calls[number] for number in self.judged]
        missed = self._missed(calls, self.assembly(as_parts(merged, self.device)), share)
        power = sum(call.square(call.between(share)) for call in calls)
        return float(np.sqrt(missed / power)) if power else 0.0

    def _missed(self, calls: Iterable[AttentionCall], parameters: Mapping[str, Tensor], share: float) -> float:
        """The squared error of the layer in some calls."""
        missed = 0.0
        for call in calls:
            with self.options.precision():
                output, _ = self.attention.run(call, parameters)
            missed += call.square(output - call.between(share))
        return missed

    def _pooled(self) -> Heads:
        """Mean pooling, to compare with."""
        keys, values = self.source.keys, self.source.values
        return replace(
            self.source,
            keys=keys.reshape(self.options.groups, -1, *keys.shape[1:]).mean(1),
            values=values.reshape(self.options.groups, -1, *values.shape[1:]).mean(1),
        )

    def _first_low_frequency(self, moments: Moments) -> int | None:
        """The first rotary pair that is merged as if it had no positions.

        The output of attention with merged keys and the source's values decides, at every distance in the text.
        """
        limits = self.layer.constraints
        count = len(limits.pairs[0])
        if limits.key_constraint or not count:
            return None
        calls = self.attention.calls
        tokens = calls[0].hidden.shape[:2].numel()
        calls = calls[: max(1, LOW_FREQUENCY_TOKENS // tokens)]
        unmerged = Assembly(self.layer.layout, self.layer.tensors, self.source.groups, self.device)
        trials = KeyTrials(self.source, self.options.groups, limits, moments)

        def error(first_low: int) -> float:
            parameters = unmerged(as_parts(trials.merged(first_low), self.device))
            return self._missed(calls, parameters, share=0)

        return least(error, count)

    def _trained(self, merged: Heads) -> Heads:
        """The heads after the gradient stage; those given where it does not bring them nearer on held-out text.

        The stage aims at what the source's attention makes of the student's inputs, and at a share of what the
        student's residual stream misses already: the share that the layer can predict on held-out text. In deep models
        it is small, and to fit the rest, which is noise to the layer, would do harm on other text.
        """
        options = self.options
        if not options.steps or self.error(merged, share=0) < self.exact:
            return merged
        parts = as_parts(merged, self.device)
        _, share = self._repair(parts)
        trained = fit_gradient(
            parts,
            self.attention,
            self.assembly,
            share,
            count=len(self.fitted),
            steps=options.steps,
            seed=options.seed,
            precision=options.precision,
            on_step=partial(self.on_stage, Stage.GRADIENT),
        )
        found = as_heads(trained)
        return found if self.error(found, share) < self.error(merged, share) else merged

    def _refitted(self, merged: Heads) -> Heads:
        """The heads with a change of the output projection that brings the student's residual stream nearer to the
        source's, as far as held-out text confirms it.
        """
        self.on_stage(Stage.REFIT, 0, 0)
        if self.error(merged, share=1) < self.exact:
            return merged
        parts = as_parts(merged, self.device)
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
        parameters = self.assembly(parts)
        fitted = self._regression(parameters, self.fitted)
        judged = self._regression(parameters, self.judged)
        change, whole = best_change(fitted, judged), judged.error(None)
        return change, max(0.0, 1 - judged.error(change) / whole) if whole else 0.0

    def _regression(self, parameters: Mapping[str, Tensor], numbers: Iterable[int]) -> Regression:
        """Of what the student's residual stream misses, on what enters the output projection, over some batches."""
        found = Regression(biased=self.source.output_bias is not None)
        for number in numbers:
            call = self.attention.calls[number]
            with self.options.precision():
                output, entered = self.attention.run(call, parameters)
            found.add(entered, call.target - output, call.counted)
        return found
