"""Fits one attention layer on calibration text.

The moments of the *student's* inputs, which the layers below have merged already, decide how the layer's heads are
merged. `fit` then refits the output projection so that the student's residual stream behind the layer comes as near as
possible to the source's, and trains the merged projections by gradient steps.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor

from gqa_convert.conversion.fit.assembly import Assembly, Parts, as_heads, as_parts
from gqa_convert.conversion.fit.fibonacci_search import least
from gqa_convert.conversion.fit.key_trials import KeyTrials
from gqa_convert.conversion.fit.lockstep import Call, CapturedModule, mapped_file
from gqa_convert.conversion.fit.matching import match
from gqa_convert.conversion.fit.records import CalibratedRecord, OnStage, Stage, recorded_order
from gqa_convert.conversion.fit.source_layer import SourceLayer
from gqa_convert.conversion.fit.statistics import Ridge, moments_of
from gqa_convert.errors import UnsupportedFamilyError
from gqa_convert.merging.folding.head_order import order_heads, ordered
from gqa_convert.merging.folding.heads import Heads
from gqa_convert.merging.folding.merge import Moments, merge_layer

RIDGE = 1e-3
_EXACT = 1e-5
"""The error below which training would only add noise."""
_LOW_FREQUENCY_TOKENS = 8192
"""How many tokens, at most, decide which rotary pairs count as low-frequency."""


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
        self.source = layer.layout.cut(layer.tensors)
        self.device = next(iter(module.parameters().values())).device
        self.assembly = Assembly(layer.layout, self.source, layer.tensors, self.groups, self.device)
        self._check_parameters()
        weight, _ = layer.layout.output_names
        self.projection = weight.removeprefix(f"{layer.layout.layer.module}.").removesuffix(".weight")
        self.biased = self.source.output_bias is not None
        self.power: float | None = None
        on_stage(Stage.STATISTICS, 0, 0)
        self.targets = [self._kept(self._target(source, student)) for source, student in module.calls]

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

    def run(self) -> tuple[Heads, CalibratedRecord]:
        """The merged layer, and its record."""
        options, moments = self.options, moments_of(self.module, self.source)
        self.on_stage(Stage.HEAD_ORDER, 0, 0)
        order = order_heads(self.source, self.groups, self.constraints, moments)
        pooled = self.error(self.pooled())  # of neighbours, before heads are reordered
        self.source = ordered(self.source, order)
        self.on_stage(Stage.LOW_FREQUENCY, 0, 0)
        low_frequency = self.low_frequency_pairs(moments)
        merged = merge_layer(self.source, self.groups, "factor", self.constraints, moments, low_frequency)
        if options.trains:
            merged = self.refitted(merged)
        left = self.error(merged)
        if options.trains and options.steps and left > _EXACT:
            trained = self.refitted(self.matched(merged))
            if (error := self.error(trained)) < left:
                merged, left = trained, error
        return merged, CalibratedRecord(
            module=self.module.name,
            head_order=recorded_order(order),
            output=left,
            gap_left=(left / pooled) ** 2 if pooled else 0.0,
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
        calls = [student for _, student in self.module.calls][: max(1, _LOW_FREQUENCY_TOKENS // self._tokens())]
        wanted = [self.module.run(call)[0] for call in calls]
        layout, tensors = self.layer.layout, self.layer.tensors
        unmerged = Assembly(layout, self.source, tensors, self.source.groups, self.device)

        trials = KeyTrials(self.source, self.groups, self.constraints, moments)

        def error(low_frequency: int) -> float:
            parameters = unmerged(as_parts(trials.merged(low_frequency), self.device))
            return sum(
                _square(self.module.run(call, parameters)[0] - want, call)
                for call, want in zip(calls, wanted, strict=True)
            )

        return least(error, count)

    def _tokens(self) -> int:
        shape = self.module.calls[0][1].hidden.shape
        return int(shape[0] * shape[1])

    def matched(self, merged: Heads) -> Heads:
        """The heads after the gradient stage."""
        calls = [student for _, student in self.module.calls]

        def run(call: Call, parts: Parts) -> Tensor:
            return self.module.run(call, self.assembly(parts))[0]

        options, parts = self.options, as_parts(merged, self.device)
        on_step = partial(self.on_stage, Stage.GRADIENT)
        trained = match(parts, run, calls, self.targets, steps=options.steps, seed=options.seed, on_step=on_step)
        return as_heads(trained)

    def refitted(self, merged: Heads) -> Heads:
        """The heads with the output projection that brings the student's residual stream nearest to the source's."""
        self.on_stage(Stage.REFIT, 0, 0)
        parts = as_parts(merged, self.device)
        parameters = self.assembly(parts)
        ridge = Ridge(RIDGE, self.biased)
        for (_, call), target in zip(self.module.calls, self.targets, strict=True):
            _, entered = self.module.run(call, parameters, capture=self.projection)
            assert entered is not None
            ridge.add(entered, target, call.counted)
        heads, ratio, hidden_size, head_dim = parts["outputs"].shape
        before = parts["outputs"].permute(2, 0, 1, 3).flatten(1)
        weight, bias = ridge.solve(before, parts.get("output_bias"))
        parts["outputs"] = weight.reshape(hidden_size, heads, ratio, head_dim).permute(1, 2, 0, 3)
        if bias is not None:
            parts["output_bias"] = bias
        return as_heads(parts)

    def error(self, merged: Heads) -> float:
        """The error of the student's residual stream, relative to what the source's attention adds, in root mean square."""
        parameters = self.assembly(as_parts(merged, self.device))
        pairs = list(zip(self.module.calls, self.targets, strict=True))
        if self.power is None:
            self.power = sum(_square(target, call) for (_, call), target in pairs)
        missed = sum(_square(self.module.run(call, parameters)[0] - target, call) for (_, call), target in pairs)
        return float(np.sqrt(missed / self.power)) if self.power else 0.0

    def _kept(self, target: Tensor) -> Tensor:
        spill = self.options.spill
        if spill is None or target.device.type != "cpu":
            return target
        return mapped_file(spill, target.nbytes).view(target.dtype).reshape(target.shape).copy_(target)

    def _target(self, source: Call, student: Call) -> Tensor:
        """The attention output that makes the student's residual stream equal to the source's."""
        wanted = self.module.run(source)[0]
        theirs, ours = self.module.residual(source), self.module.residual(student)
        return wanted if theirs is None or ours is None else wanted + theirs - ours


def _square(tensor: Tensor, call: Call) -> float:
    squares = tensor.detach().double().square().sum(-1)
    return float((squares if call.counted is None else squares[call.counted]).sum())
