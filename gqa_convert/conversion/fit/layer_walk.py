"""Walks through the layers of a loaded source and its student in lockstep, and fits each on calibration text."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gqa_convert.checkpoint.devices import chosen_device
from gqa_convert.checkpoint.source_files import SourceFiles
from gqa_convert.conversion.fit.assembly import repeated_parameters
from gqa_convert.conversion.fit.calibrated import KEPT_BYTES, STEPS
from gqa_convert.conversion.fit.divergence import summed_divergence
from gqa_convert.conversion.fit.layer_fitting import FitOptions, LayerFitting, judging_batches
from gqa_convert.conversion.fit.lockstep import Batch, LockstepRunner, open_model, running_device
from gqa_convert.conversion.fit.merged_layers import MergedLayers
from gqa_convert.conversion.fit.precision import precision_of
from gqa_convert.conversion.fit.records import LayerDone, Stage, StageProgress
from gqa_convert.conversion.fit.resource_errors import explained
from gqa_convert.conversion.fit.source_layer import SourceReader, attention_of, read_source_layer
from gqa_convert.conversion.fit.whole_model import affordable, check_possible, rank_for, train_together
from gqa_convert.conversion.plan import Plan
from gqa_convert.merging.attention_heads import LayerLayout


@dataclass(frozen=True, slots=True)
class FittedLayers:
    """What is known of a result once its layers are fitted."""

    errors: Mapping[str, float]
    """Of each module's `output`, the part of its target that it misses, in root mean square."""
    divergence: float
    """KL(source || result) in nats per token, on calibration text that no gradient step and no regression has seen; where
    there is a single batch, on that one.
    """


def fit_checkpoint(
    plan: Plan,
    store: MergedLayers,
    batches: Sequence[Batch],
    on_layer: LayerDone,
    *,
    steps: int = STEPS,
    kl_steps: int | None = None,
    kl_rank: int | None = None,
    default_kl_steps: int = 0,
    held_out: Sequence[Batch] = (),
    fresh: Sequence[Batch] = (),
    device: str | None = None,
) -> FittedLayers:
    """Load the source, fit every layer with `fit_layers`, then train all layers together where that is possible.

    Activations are kept on the disk where memory is short.

    Args:
        plan: of the conversion, of a method that takes calibration text.
        store: where merged layers go; those that it holds already are not merged again.
        batches: of calibration text.
        on_layer: called with the record of each layer, and with those of the stage that trains all of them.
        steps: gradient steps of each layer.
        kl_steps: steps of the stage that trains all layers together. By default it takes `default_kl_steps` where it
            is `affordable` and `WORTHWHILE`, else none.
        kl_rank: of that stage's changes of query and output projections, 0 to train these as they are; by default what
            `common_rank` says.
        default_kl_steps: see `kl_steps`.
        held_out: other batches, by which that stage is judged. Without any it is left out.
        fresh: still other batches, which that stage sees beside `batches`.
        device: to run on; by default a GPU if there is one.

    Raises:
        NoSpaceError: the disk cannot hold the activations.
        DeviceMemoryError: the memory is too small.
        OptionError: `kl_steps` is given, and all layers cannot be trained together.
        GQAConvertError: as `fit_layers`.
    """
    folder = plan.checkpoint.folder
    assert folder is not None
    with explained(store.path.parent), ExitStack() as stack:
        count = len(plan.merged_layers)
        on_layer(0, count, StageProgress(Stage.SOURCE, 0, count))
        model = open_model(folder, device=chosen_device(device))
        if kl_steps:
            check_possible(model, held_out, kl_steps)
        done = store.finished()
        if done is not None and (done.requested_steps, done.requested_rank) != (kl_steps, kl_rank):
            store.reopen()
        spill = Path(stack.enter_context(TemporaryDirectory(dir=store.path))) if _is_large(model, batches) else None
        fitted = fit_layers(plan, store, model, batches, on_layer, steps=steps, spill=spill)
        rank = rank_for(plan, model, batches, kl_rank)
        together = _steps_together(plan, model, batches, held_out, default_kl_steps, kl_steps, rank)
        if together and store.finished() is None:
            requested = kl_steps is not None
            train_together(
                plan,
                store,
                model,
                [*fresh, *batches],
                held_out,
                on_layer,
                steps=together,
                seed=plan.seed,
                rank=rank,
                precision=precision_of(plan, running_device(model)),
                requested=requested,
                requested_rank=kl_rank,
            )
        trained = store.finished()
        return fitted if trained is None else replace(fitted, divergence=trained.kl.after)


def _steps_together(
    plan: Plan,
    model: Any,
    batches: Sequence[Batch],
    held_out: Sequence[Batch],
    steps: int,
    kl_steps: int | None,
    rank: int,
) -> int:
    """The steps of the stage that trains all layers together; 0 to leave it out."""
    if not plan.merge_method.trains:
        return 0
    if kl_steps is not None:
        return kl_steps
    possible = steps and held_out
    return steps if possible and affordable(plan, model, batches, rank) else 0


def _is_large(model: Any, batches: Sequence[Batch]) -> bool:
    """Whether the activations that wait between layers would take more than a quarter of the free memory."""
    from accelerate.utils import get_max_memory

    hidden_size = max((parameter.shape[-1] for parameter in model.parameters() if parameter.dim() == 2), default=0)
    tokens = sum(max(tensor.numel() for tensor in batch.values()) for batch in batches)
    return bool(tokens * hidden_size * KEPT_BYTES > get_max_memory()["cpu"] / 4)


def fit_layers(
    plan: Plan,
    store: MergedLayers,
    model: Any,
    batches: Sequence[Batch],
    on_layer: LayerDone,
    *,
    steps: int = STEPS,
    spill: Path | None = None,
) -> FittedLayers:
    """Merge every layer on calibration text, in the order in which the model runs them.

    Each layer is read from the source, merged, and stored as the result will have it. The student then continues with
    the stored numbers.

    Args:
        plan: of method `fit`, or of `factor`, which ends with the closed form.
        store: where merged layers go; those that it holds already are not merged again.
        model: the loaded source.
        batches: of calibration text.
        on_layer: called with the record of each layer.
        steps: gradient steps of each layer.
        spill: a folder for activations; None to keep them in memory.

    Raises:
        NonFiniteError: a tensor holds NaN or Inf.
        UnsupportedFamilyError: the loaded module's parameters are not the checkpoint's tensors.
    """
    finder = attention_of(plan)
    numbers = {layer.module: number for number, (layer, _) in enumerate(plan.merged_layers)}
    precision = precision_of(plan, running_device(model))
    errors: dict[str, float] = {}
    done = 0  # layers

    def on_stage(stage: Stage, step: int, steps: int) -> None:
        on_layer(done, len(numbers), StageProgress(stage, done + 1, len(numbers), step, steps))

    with ExitStack() as stack:
        read = SourceReader(plan.checkpoint, SourceFiles(plan.checkpoint, store.path, stack))
        runner = stack.enter_context(
            LockstepRunner(
                model,
                batches,
                list(numbers),
                spill=spill,
                precision=precision,
                on_batch=partial(on_stage, Stage.FORWARD),
            )
        )
        for module in runner:
            number = numbers[module.name]
            layer, groups = plan.merged_layers[number]
            record = store.record(number)
            if record is None:
                source = read_source_layer(finder, layer, plan.limits_of(layer), read)
                options = FitOptions(
                    groups=groups,
                    trains=plan.merge_method.trains,
                    steps=steps,
                    seed=plan.seed,
                    spill=spill,
                    precision=precision,
                )
                merged, record = LayerFitting(module, source, options, on_stage).run()
                tensors = source.layout.merge_heads(merged, source.tensors, groups)
                store.write(number, tensors, record)
                del source, merged, tensors
            module.commit(repeated_parameters(LayerLayout(finder, layer), store.read(number), groups))
            errors |= record.errors
            done += 1
            on_layer(done, len(numbers), record)
        decodes = model.config.is_encoder_decoder
        judged = judging_batches(len(batches))
        sums = [
            summed_divergence(student, source, batches[number], decodes=decodes)
            for number, (source, student) in zip(judged, runner.logits(judged), strict=True)
        ]
        total, count = sum(float(total) for total, _ in sums), sum(float(count) for _, count in sums)
    return FittedLayers(errors, total / max(1.0, count))
