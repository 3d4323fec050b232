"""The methods that measure on calibration text, layer by layer.

The moments of the *student's* inputs, which the layers below have merged already, decide how each layer's heads are
merged. `fit` then refits the output projection so that the student's residual stream behind the layer comes as near as
possible to the source's.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gqa_convert.checkpoint.source_files import SourceFiles
from gqa_convert.conversion.fit.assembly import Assembly, Parts, as_heads, as_parts
from gqa_convert.conversion.fit.key_trials import KeyTrials
from gqa_convert.conversion.fit.layers import LayerDone, SourceTensors, attention_of
from gqa_convert.conversion.fit.lockstep import Batch, Call, CapturedModule, LockstepRunner, mapped_file, open_model
from gqa_convert.conversion.fit.matching import STEPS, match
from gqa_convert.conversion.fit.merged_layers import MergedLayers
from gqa_convert.conversion.fit.resource_errors import explained
from gqa_convert.conversion.fit.statistics import Ridge, moments_of
from gqa_convert.conversion.fit.whole_model import affordable, check_possible, train_together
from gqa_convert.conversion.plan import Plan
from gqa_convert.errors import UnsupportedFamilyError
from gqa_convert.families.geometry import AttentionLayer
from gqa_convert.merging.folding.constraints import FoldingConstraints, find_folding_constraints
from gqa_convert.merging.folding.head_order import noted, order_heads, ordered
from gqa_convert.merging.folding.heads import Heads, LayerTensors, Tensors
from gqa_convert.merging.folding.merge import Moments, merge_layer

RIDGE = 1e-3
_KEPT_BYTES = 4 * 5
"""Per token and unit of hidden_size: the residual stream and attention's input, of source and student, and the target,
in float32.
"""
_EXACT = 1e-5
"""The error below which training would only add noise."""
_LOW_FREQUENCY_TOKENS = 8192
"""How many tokens, at most, decide which rotary pairs count as low-frequency."""
_DENT = 2
"""The number of pairs over which the error may rise before it falls further."""


def fit_checkpoint(
    plan: Plan,
    store: MergedLayers,
    batches: Sequence[Batch],
    on_layer: LayerDone,
    *,
    steps: int = STEPS,
    kl_steps: int | None = None,
    held_out: Sequence[Batch] = (),
) -> dict[str, float]:
    """`fit_layers` with the source loaded, on a GPU where there is one, and then all layers together; activations go to
    the disk where memory is short.

    Args:
        plan: as for `fit_layers`, as `store`, `batches`, `on_layer` and `steps`.
        kl_steps: of the stage that trains all layers together; by default `steps` where it is `affordable` and
            `WORTHWHILE`, else 0.
        held_out: other batches, on which that stage is judged; without any it is left out.

    Raises:
        NoSpaceError: the disk can't hold them.
        DeviceMemoryError: there is not enough memory.
        OptionError: `kl_steps` where all layers can't be trained together.
        GQAConvertError: as `fit_layers`.
    """
    folder = plan.checkpoint.folder
    assert folder is not None
    with explained(store.path.parent), ExitStack() as stack:
        model = open_model(folder, device="cuda" if torch.cuda.is_available() else "cpu")
        if kl_steps:
            check_possible(model, held_out, kl_steps)
        done = store.finished()
        if done is not None and done["asked"] != kl_steps:
            store.reopen()
        spill = Path(stack.enter_context(TemporaryDirectory(dir=store.path))) if _is_large(model, batches) else None
        errors = fit_layers(plan, store, model, batches, on_layer, steps=steps, spill=spill)
        if store.finished() is None and kl_steps != 0 and plan.merge_method.trains:
            if kl_steps is not None:
                train_together(plan, store, model, batches, held_out, on_layer, steps=kl_steps, seed=plan.seed)
            elif steps and held_out and affordable(model, batches, len(plan.layers)):
                train_together(
                    plan, store, model, batches, held_out, on_layer, steps=steps, seed=plan.seed, asked=False
                )
        return errors


def _is_large(model: Any, batches: Sequence[Batch]) -> bool:
    """Whether what waits between layers would take more than a quarter of the free memory."""
    from accelerate.utils import get_max_memory

    width = max((parameter.shape[-1] for parameter in model.parameters() if parameter.dim() == 2), default=0)
    tokens = sum(max(tensor.numel() for tensor in batch.values()) for batch in batches)
    return bool(tokens * width * _KEPT_BYTES > get_max_memory()["cpu"] / 4)


def fit_layers(
    plan: Plan,
    store: MergedLayers,
    model: Any,
    batches: Sequence[Batch],
    on_layer: LayerDone,
    *,
    steps: int = STEPS,
    spill: Path | None = None,
) -> dict[str, float]:
    """Merge every layer of a plan of method `fit`, or of `factor` on calibration text, which ends with the closed form.

    Args:
        plan: of the conversion.
        store: where merged layers go; those that it holds already are not made again.
        model: the loaded source.
        batches: of calibration text.
        on_layer: called as each is done.
        steps: of each layer's gradient stage.
        spill: a folder for activations; in memory without it.

    Returns:
        Errors by names: of each module's `output`, the part of its target that it misses, in root mean square.

    Raises:
        NonFiniteError: a tensor holds NaN or Inf.
        UnsupportedFamilyError: the loaded module's parameters are not the checkpoint's tensors.
    """
    finder = attention_of(plan)
    layers = {layer.module: layer for layer in finder.layers}
    numbers = {module: number for number, module in enumerate(layers)}
    errors: dict[str, float] = {}
    done = 0
    with ExitStack() as stack:
        read = SourceTensors(plan.checkpoint, SourceFiles(plan.checkpoint, store.path, stack))
        runner = stack.enter_context(LockstepRunner(model, batches, list(layers), spill=spill))
        for module in runner:
            number, layer = numbers[module.name], layers[module.name]
            parts = LayerTensors(finder, layer)
            record = store.record(number)
            if record is None:
                tensors: Tensors = {name: read(name) for name in parts.names}
                fitting = LayerFitting(
                    module,
                    layer,
                    parts,
                    tensors,
                    plan.groups,
                    find_folding_constraints(finder, layer),
                    closed_loop=plan.merge_method.trains,
                    steps=steps,
                    seed=plan.seed,
                    spill=spill,
                )
                merged, found = fitting.run()
                record = {"module": layer.module} | found
                store.write(number, parts.join(merged, tensors, plan.groups), record)
            module.commit(_parameters(store.read(number), layer))
            errors[f"{layer.module}.output"] = record["output"]
            done += 1
            on_layer(done, len(layers), record)
    return errors


def _parameters(tensors: Tensors, layer: AttentionLayer) -> dict[str, Tensor]:
    """What was written, as the module's parameters: rounded as it will be in the result."""
    return {
        name.removeprefix(f"{layer.module}."): torch.from_numpy(array.astype(np.float32))
        for name, array in tensors.items()
    }


class LayerFitting:
    """The work on one layer: from `run` on, its source's heads are in the order in which they are merged.

    Args:
        module: the captured module, with the calls of all batches.
        layer: its geometry.
        parts: its tensors' layout.
        tensors: its tensors.
        groups: K/V heads of the result.
        constraints: what forbids folding.
        closed_loop: whether to repair the errors of the layers below after the closed form, by refits and the
            gradient stage.
        steps: of the gradient stage.
        seed: of its order.
        spill: a folder for targets; in memory without it.
    """

    def __init__(
        self,
        module: CapturedModule,
        layer: AttentionLayer,
        parts: LayerTensors,
        tensors: Tensors,
        groups: int,
        constraints: FoldingConstraints,
        *,
        closed_loop: bool,
        steps: int,
        seed: int,
        spill: Path | None = None,
    ) -> None:
        self.closed_loop, self.steps, self.seed = closed_loop, steps, seed
        self.module, self.groups, self.constraints = module, groups, constraints
        self.parts, self.tensors = parts, tensors
        self.source = parts.cut(tensors)
        own = module.parameters()
        self.device = next(iter(own.values())).device
        self.assembly = Assembly(parts, self.source, tensors, groups, self.device)
        step = self.source.groups // groups
        firsts = replace(
            self.source, keys=self.source.keys[::step], values=self.source.values[::step]
        )  # any heads will do here
        for name, made in self.assembly(as_parts(firsts, self.device)).items():
            if name not in own or own[name].shape != made.shape:
                raise UnsupportedFamilyError(
                    f"transformers holds {layer.module} otherwise than the checkpoint does ({name}), so that calibration can't fit it: "
                    "choose --method factor without calibration text"
                )
        weight, _ = parts.output_names
        self.projection = weight.removeprefix(f"{layer.module}.").removesuffix(".weight")
        self.biased = self.source.output_bias is not None
        self.power: float | None = None
        self.targets = [self._kept(self._target(source, student), spill) for source, student in module.calls]

    def run(self) -> tuple[Heads, dict[str, Any]]:
        """The merged layer, and its record."""
        moments = moments_of(self.module, self.source)
        order = order_heads(self.source, self.groups, self.constraints, moments)
        pooled = self.error(self.pooled())  # of neighbours, before heads are reordered
        self.source = ordered(self.source, order)
        low_frequency = self.low_frequency_pairs(moments)
        merged = merge_layer(self.source, self.groups, "factor", self.constraints, moments, low_frequency)
        if self.closed_loop:
            merged = self.refitted(merged)
        left = self.error(merged)
        if self.closed_loop and self.steps and left > _EXACT:
            trained = self.refitted(self.matched(merged))
            if (error := self.error(trained)) < left:
                merged, left = trained, error
        gap = (left / pooled) ** 2 if pooled else 0.0
        return merged, {"output": left, "gap_left": gap, "slow_pairs_from": low_frequency} | noted(order)

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
        unmerged = Assembly(self.parts, self.source, self.tensors, self.source.groups, self.device)

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

        return as_heads(
            match(as_parts(merged, self.device), run, calls, self.targets, steps=self.steps, seed=self.seed)
        )

    def refitted(self, merged: Heads) -> Heads:
        """The heads with the output projection that brings the student's residual stream nearest to the source's."""
        parts = as_parts(merged, self.device)
        parameters = self.assembly(parts)
        ridge = Ridge(RIDGE, self.biased)
        for (_, call), target in zip(self.module.calls, self.targets, strict=True):
            _, entered = self.module.run(call, parameters, capture=self.projection)
            assert entered is not None
            ridge.add(entered, target, call.counted)
        heads, ratio, width, columns = parts["outputs"].shape
        before = parts["outputs"].permute(2, 0, 1, 3).flatten(1)
        weight, bias = ridge.solve(before, parts.get("output_bias"))
        parts["outputs"] = weight.reshape(width, heads, ratio, columns).permute(1, 2, 0, 3)
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

    def _kept(self, target: Tensor, spill: Path | None) -> Tensor:
        if spill is None or target.device.type != "cpu":
            return target
        return mapped_file(spill, target.nbytes).view(target.dtype).reshape(target.shape).copy_(target)

    def _target(self, source: Call, student: Call) -> Tensor:
        """The attention output that makes the student's residual stream equal to the source's."""
        wanted = self.module.run(source)[0]
        theirs, ours = self.module.residual(source), self.module.residual(student)
        return wanted if theirs is None or ours is None else wanted + theirs - ours


def least(error: Callable[[int], float], count: int) -> int:
    """The number from 0 to `count` with the least error, by a Fibonacci search.

    The error must fall towards one point and rise behind it, except for dents of up to `_DENT` numbers, which a local
    search at the end crosses. Each step of the search needs one more error.
    """
    seen: dict[int, float] = {}

    def at(number: int) -> float:
        if number not in seen:
            seen[number] = error(number) if number <= count else np.inf
        return seen[number]

    low, short, long = 0, 1, 2
    while short + long < count:
        short, long = long, short + long
    # the range is [low, low + short + long]
    while short + long > 3:
        left, right = low + short, low + long
        if right > count or at(left) < at(right):
            short, long = long - short, short
        else:
            low += short
            short, long = long - short, short
    best = min(range(low, min(low + short + long, count) + 1), key=at)
    while (better := min(range(max(0, best - _DENT), min(best + _DENT, count) + 1), key=at)) != best:
        best = better
    return best


def _square(tensor: Tensor, call: Call) -> float:
    squares = tensor.detach().double().square().sum(-1)
    return float((squares if call.counted is None else squares[call.counted]).sum())
