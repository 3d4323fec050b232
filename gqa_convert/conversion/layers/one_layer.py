"""Fits one attention layer on calibration text.

The moments of the *student's* inputs, which the layers below have merged already, decide how the
layer's heads are merged. `fit` then trains the merged projections to yield what the source's
attention yields on the same inputs, and as much of what the student's residual stream misses as
validation text confirms; the output projection then repairs once more what is left of that.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from gqa_convert.merging.attention_heads import Heads, Tensors, regroup_heads, rows_first
from gqa_convert.merging.factorisation import as_numpy
from gqa_convert.merging.head_grouping import find_head_order, reorder_heads
from gqa_convert.merging.merge_layer import Moments, key_trials, merge_layer
from gqa_convert.merging.methods import MergeMethod
from gqa_convert.processes import by_first, total

from .attention_calls import AttentionCall, CapturedAttention, here
from .layer_store import LayerRecord
from .merged_attention import MergedAttention, check_holds
from .model_loading import Precision
from .optimizer import RelativeAdam, batch_order
from .source_layers import SourceLayer
from .statistics import Regression, best_strength, heads_on, moments_of

RATE = 0.03
"""Of the gradient stage's `RelativeAdam`."""
LOW_FREQUENCY_TOKENS = 4096
"""How many tokens, at most, decide which rotary pairs of a layer count as low-frequency: 8,192
decided equally, 2,048 not.
"""
_EXACT = 1e-5
"""The error below which training would only add noise."""

Weights = dict[str, Tensor]
"""The projections' weights and biases of a merged layer, in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """How layers are fitted.

    Attributes:
        method: after its closed form, one that trains repairs the errors of the layers below, by
            refits and the gradient stage.
        steps: of the gradient stage.
        seed: of the order of batches in the gradient stage.
        validation: how many of the last calls decide between candidates; with 0, all do, and are
            fitted to as well.
        precision: of the products with activations.
        on_host: whether hidden states are kept in the machine's memory between layers.
    """

    method: MergeMethod
    steps: int
    seed: int
    validation: int
    precision: Precision = nullcontext
    on_host: bool = False


class OneLayer:
    """The work on one layer.

    Args:
        attention: the module, with its calls in the student.
        layer: the source's.
        kv_heads: K/V heads of the result.
        options: how to fit it.
        tell: called with the name of each stage.

    Raises:
        UnsupportedFamilyError: the loaded module's parameters are not the checkpoint's tensors.
    """

    def __init__(
        self,
        attention: CapturedAttention,
        layer: SourceLayer,
        kv_heads: int,
        options: FitOptions,
        tell: Callable[[str], None] = lambda stage: None,
    ) -> None:
        check_holds(attention.module, layer)
        self._attention, self._layer, self._layout = attention, layer, layer.layout
        self._kv_heads, self._options, self._tell = kv_heads, options, tell
        self._tensors = {name: array.astype(np.float32) for name, array in layer.tensors.items()}
        self._first = attention.batches - options.validation
        """The number of the first batch that decides between candidates."""
        self._fitted = [call for call in attention.calls if call.number < self._first]
        self._validation = self._fitted
        if options.validation:
            self._validation = [call for call in attention.calls if call.number >= self._first]

    def fit(self) -> tuple[Tensors, LayerRecord]:
        """The tensors of the merged layer, as they are published, and its record.

        Raises:
            NonFiniteError: a number is too large for its type.
        """
        limits, kv_heads = self._layer.limits, self._kv_heads
        self._tell("statistics")
        moments = moments_of(self._attention.calls)
        source = heads_on(self._layer, self._attention.calls[0].weights.device)
        # mean pooling, for comparison
        keys, values = regroup_heads(source.keys, kv_heads), regroup_heads(source.values, kv_heads)
        self._install(replace(source, keys=keys, values=values))
        error_of_mean = self._error(self._module.tensors)
        # the closed form
        self._tell("head order")
        order = by_first(partial(find_head_order, source, kv_heads, limits, moments))
        source = reorder_heads(source, order)
        self._tell("low-frequency pairs")
        first_low = self._first_low_frequency(source, moments)

        def merged() -> Heads:
            return merge_layer(source, kv_heads, limits, moments, first_low).each(as_numpy)

        found = self._install(by_first(merged))
        weights = self._module.tensors
        # gradient steps, and a last repair of the output projection
        if self._options.method.trains:
            weights = self._refitted(self._trained(weights))
        name = self._attention.name
        remaining = self._error(weights) / error_of_mean if error_of_mean else 0.0
        errors = {f"{name}.output": self._error(weights, 1)}
        tensors = self._layout.in_result_types(found | self._module.arrays(weights))
        return tensors, LayerRecord(name, errors, order.tolist(), remaining**2)

    def _install(self, merged: Heads) -> Tensors:
        """Let the attention module run with merged heads; returns the layer's tensors."""
        tensors = self._layout.merge_heads(merged, self._tensors, self._kv_heads)
        self._module = MergedAttention(
            self._layout, tensors, self._kv_heads, self._attention.module
        )
        return tensors

    def _run(self, call: AttentionCall, weights: Weights) -> tuple[Tensor, Tensor]:
        with self._options.precision(), self._module.installed(weights):
            return self._attention.run(call)

    def _error(self, weights: Weights, share: float = 0.0) -> float:
        """The error of the layer's output on validation text, relative to the target, in root mean
        square; see `AttentionCall.between` for the target.
        """
        error = power = 0.0
        for call in here(self._validation):
            output, _ = self._run(call, weights)
            target = call.between(share)
            error += float(call.squared(output - target))
            power += float(call.squared(target))
        error, power = total(error), total(power)
        return math.sqrt(error / power) if power else 0.0

    def _first_low_frequency(self, source: Heads, moments: Moments) -> int | None:
        """The first rotary pair that is merged as if it had no positions.

        The output of attention with merged keys and the source's values decides, at every distance
        in the text.
        """
        limits, layout = self._layer.limits, self._layout
        if limits.key_constraint or not limits.pairs.size:
            return None
        some = self._attention.calls[0]
        tokens = by_first(lambda: some.all_rows * some.hidden.shape[1])
        number = max(1, LOW_FREQUENCY_TOKENS // tokens)
        calls = [call for call in self._attention.calls if call.number < number]
        trial = key_trials(source, self._kv_heads, limits, moments)

        def error(first_low: int) -> float:
            tensors = layout.merge_heads(trial(first_low), self._tensors, source.kv_heads)
            unmerged = MergedAttention(layout, tensors, source.kv_heads, self._attention.module)
            summed = 0.0
            with self._options.precision(), unmerged.installed():
                for call in here(calls):
                    output, _ = self._attention.run(call)
                    summed += float(call.squared(output - call.output))
                return float(total(summed))

        return least(error, limits.pairs.shape[1])

    def _trained(self, weights: Weights) -> Weights:
        """The weights after the gradient stage; those given where it does not bring them nearer on
        validation text.

        The stage is Adam on the squared error of attention's output. It aims at what the source's
        attention makes of the student's inputs, and at a share of what the student's residual
        stream misses already: the share that the layer can predict on validation text. In deep
        models it is small, and to fit the rest, which is noise to the layer, would do harm on
        other text.
        """
        steps = self._options.steps
        if not steps or self._error(weights) < _EXACT:
            return weights
        _, _, repairable = self._repair(weights)
        copies = {name: tensor.clone() for name, tensor in weights.items()}
        optimizer = RelativeAdam([copies], RATE, steps)
        # the squared error counts relative to what it aims at
        power = numbers = 0.0
        for call in here(self._fitted):
            power += float(call.squared(call.between(repairable)))
            numbers += call.output.numel()
        mean_square = total(power) / total(numbers)
        by_number = {call.number: call for call in self._fitted}
        for done, number in enumerate(batch_order(self._first, steps, self._options.seed)):
            self._tell(f"gradient steps {done:,} of {steps:,}")
            # of some batches other processes have all rows
            for call in here([by_number[number]] if number in by_number else []):
                with torch.enable_grad():
                    output, _ = self._run(call, copies)
                    error = call.squared(output.float() - call.between(repairable))
                    torch.autograd.backward(error / (call.all_numbers * mean_square or 1.0))
            optimizer.step()
        found = {name: tensor.detach() for name, tensor in copies.items()}
        is_nearer = self._error(found, repairable) < self._error(weights, repairable)
        return found if is_nearer else weights

    def _refitted(self, weights: Weights) -> Weights:
        """The weights with a change of the output projection that brings the student's residual
        stream nearer to the source's, as far as validation text confirms it.
        """
        self._tell("refit")
        if self._error(weights, 1) < _EXACT:
            return weights
        fitted, strength, _ = self._repair(weights)
        if strength is None:
            return weights
        change = fitted.change(strength)
        weight, bias = self._layout.output_names
        refitted = dict(weights)
        if bias in weights:
            refitted[bias] = (weights[bias] + change[-1]).float()
            change = change[:-1]
        columns = rows_first(change, not self._layout.transposed)
        refitted[weight] = (weights[weight] + columns).float()
        return refitted

    def _repair(self, weights: Weights) -> tuple[Regression, float | None, float]:
        """The regression of what the student's residual stream misses on what enters the output
        projection; the strength that repairs most on validation text, None where each does harm;
        and the share that it repairs.
        """
        fitted = self._regression(self._fitted, weights)
        validation = self._regression(self._validation, weights)
        strength, repairable = by_first(partial(best_strength, fitted, validation))
        return fitted, strength, repairable

    def _regression(self, calls: Sequence[AttentionCall], weights: Weights) -> Regression:
        sums = Regression(biased=self._layout.output_names[1] in weights)
        for call in here(calls):
            output, entered = self._run(call, weights)
            sums.add(entered, call.target - output, call.weights)
        return sums.summed()


def least(error: Callable[[int], float], count: int) -> int:
    """The number from 0 to `count` with the least error, by steps that halve, and then of those
    next to it.

    The error must fall towards one point and rise behind it, except for dents of two numbers.
    """
    at = cache(error)
    best, step = count // 2, (count + 2) // 4
    while step:
        near = [number for number in (best, best - step, best + step) if 0 <= number <= count]
        best = min(near, key=at)
        step //= 2
    return min(range(max(0, best - 2), min(count, best + 2) + 1), key=at)
