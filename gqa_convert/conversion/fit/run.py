"""Merges the layers of a plan, for methods that work on whole layers, so that the writer finds them ready."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gqa_convert._version import __version__
from gqa_convert.checkpoint.devices import chosen_device
from gqa_convert.checkpoint.headers import TensorEntry
from gqa_convert.checkpoint.provenance import CalibrationRecord, Divergence
from gqa_convert.conversion.fit.batches import prepare_calibration
from gqa_convert.conversion.fit.from_weights import merge_layers
from gqa_convert.conversion.fit.layer_store import LayerStore, TrainingRecord
from gqa_convert.conversion.fit.memory import free_memory, trains_together
from gqa_convert.conversion.fit.options import CalibrationOptions, steps_per_layer, steps_together
from gqa_convert.conversion.fit.progress import ALL_TOGETHER, MERGING_LAYERS, FitProgress, OnProgress
from gqa_convert.conversion.fit.resource_errors import explained
from gqa_convert.conversion.plan import Plan
from gqa_convert.errors import OptionError

if TYPE_CHECKING:
    from gqa_convert.conversion.fit.calibration_text import Calibration
    from gqa_convert.conversion.fit.distillation import DistillationOptions


@dataclass(frozen=True, slots=True)
class PreparedLayers:
    """Layers that were merged before the writer runs, and what the result's record says of them."""

    tensors: Mapping[str, tuple[Path, TensorEntry]] = field(default_factory=dict)
    """By the names of the result's tensors: the file that holds each, and where in it."""
    errors: Mapping[str, float] | None = None
    """By name; None where the writer merges, and measures the errors itself."""
    calibration: CalibrationRecord | None = None
    """What the source was run on."""
    head_order: Mapping[str, list[int]] = field(default_factory=dict)
    """By module: the source's K/V heads in the order in which they were merged, where it is not the source's."""
    device: str = "cpu"
    """On which the work was done."""


def prepare_layers(
    plan: Plan, out: Path, options: CalibrationOptions, stack: ExitStack, on_progress: OnProgress
) -> PreparedLayers:
    """Merge every layer of a plan whose method works on whole layers; of any other plan none.

    Args:
        plan: of a local checkpoint.
        out: the folder of the result. Merged layers lie in a hidden folder beside it until `stack` is closed; those
            that were measured on calibration data stay there after an error, so that the next run resumes.
        options: of calibration.
        stack: closed once the result is written.
        on_progress: called as the work goes on.

    Raises:
        GQAConvertError: one of its subclasses.
    """
    if not plan.merge_method.merges_layers:
        return PreparedLayers()
    count = len(plan.merged_layers)
    fingerprint = {
        "version": __version__,
        "source": str(plan.checkpoint.origin.folder),
        "files": [[shard.file, shard.size, shard.modified_ns] for shard in plan.checkpoint.origin.shards],
        "config": plan.checkpoint.config,
        "method": plan.method,
        "groups": plan.stated_groups,
        "modules": [layer.module for layer in plan.layers],
    }
    record, device = None, "cpu"
    if not options.has_data:
        store = stack.enter_context(LayerStore(out, fingerprint, keep=False))
        merge_layers(plan, store, on_progress)
    else:
        on_progress(FitProgress(MERGING_LAYERS, 0, count, "reading the text"))
        calibration = prepare_calibration(
            plan, options, lambda label, done, total: on_progress(FitProgress(label, done, total))
        )
        record = CalibrationRecord(
            text=calibration.description,
            tokens=calibration.tokens,
            sequence_length=calibration.sequence_length,
            seed=options.seed,
            steps=steps_per_layer(options),
            digest=calibration.digest,
        )
        store = stack.enter_context(LayerStore(out, fingerprint | record.inputs(), keep=True))
        device = chosen_device(options.device)
        training = fit_checkpoint(plan, store, calibration, options, on_progress)
        record = replace(record, kl_steps=training.kl_steps, kl=training.kl)
    errors: dict[str, float] = {}
    head_order = {}
    for number in range(count):
        layer = store.record(number)
        assert layer is not None
        errors |= layer.errors
        if layer.head_order is not None:
            head_order[layer.module] = layer.head_order
    return PreparedLayers(store.locate(count), errors, record, head_order, device)


def fit_checkpoint(
    plan: Plan, store: LayerStore, calibration: "Calibration", options: CalibrationOptions, on_progress: OnProgress
) -> TrainingRecord:
    """Load the source, fit every layer, then train all layers together where that is possible.

    Args:
        plan: of the conversion, of a method that takes calibration data.
        store: where merged layers go; those that it holds already are not merged again.
        calibration: the batches. Without held-out ones the last stage is left out.
        options: of calibration.
        on_progress: called as the work goes on.

    Returns:
        What the last stage has done, with no steps where it was left out.

    Raises:
        NoSpaceError: the disk cannot hold the activations.
        DeviceMemoryError: the memory is too small.
        OptionError: `kl_steps` is given, and all layers cannot be trained together.
        NonFiniteError: a tensor of the source holds NaN or Inf.
        UnsupportedFamilyError: the loaded modules' parameters are not the checkpoint's tensors.
    """
    from gqa_convert.conversion.fit.calibration_text import digest_of
    from gqa_convert.conversion.fit.distillation import Student, train_together
    from gqa_convert.conversion.fit.layer_fitting import LayerFitting
    from gqa_convert.conversion.fit.model_loading import open_model

    assert plan.checkpoint.folder is not None
    layers = range(len(plan.merged_layers))
    with explained(store.path.parent):
        on_progress(FitProgress(MERGING_LAYERS, 0, len(layers), "loading the source"))
        model = open_model(plan.checkpoint.folder, device=chosen_device(options.device))
        stage = _last_stage(plan, model, calibration, options)
        further = [*calibration.fresh, *calibration.held_out]
        request = {"kl_steps": options.kl_steps, "data": digest_of([], further)}
        finished = store.finished()
        is_whole = all(store.record(number) is not None for number in layers)
        if finished is not None and not (is_whole and finished.request == request):
            store.reopen()
        fitting = LayerFitting(plan, store, model, on_progress, steps=steps_per_layer(options))
        divergence = fitting.run(calibration.batches)
        finished = store.finished()
        if finished is not None:
            return finished
        if stage is None:
            return TrainingRecord(request=request, kl_steps=0, kl=Divergence(divergence, divergence))
        student = Student(plan, store, model)
        learned = [*calibration.fresh, *calibration.batches]
        trained, kl = train_together(student, learned, calibration.held_out, stage, on_progress)
        finished = TrainingRecord(request=request, kl_steps=stage.steps if kl.before >= stage.least else 0, kl=kl)
        if trained is None:
            store.finish(finished)
        else:
            errors = student.errors(calibration.held_out[0], trained)
            store.finish(finished, student.tensors(trained), errors)
        on_progress(FitProgress(ALL_TOGETHER, stage.steps, stage.steps, kl=kl))
        return finished


def _last_stage(
    plan: Plan, model: Any, calibration: "Calibration", options: CalibrationOptions
) -> "DistillationOptions | None":
    """How all layers are trained together; None to leave the stage out.

    Raises:
        OptionError: `kl_steps` is given, and the stage is impossible.
    """
    from gqa_convert.conversion.fit.distillation import WORTHWHILE, DistillationOptions
    from gqa_convert.conversion.fit.layer_walk import running_device
    from gqa_convert.conversion.fit.model_loading import is_offloaded
    from gqa_convert.conversion.fit.precision import precision_of

    steps = steps_together(options)
    if not plan.merge_method.trains or not steps:
        return None
    device = running_device(model)
    precision = precision_of(plan, device)
    if options.kl_steps is None:
        free = free_memory(str(device))
        affordable = trains_together(plan, calibration.sequence_length, free, device.type)
        if is_offloaded(model) or not calibration.held_out or not affordable:
            return None
        return DistillationOptions(steps=steps, seed=plan.seed, least=WORTHWHILE, precision=precision)
    if is_offloaded(model):
        raise OptionError(
            f"--kl-steps {steps} trains all layers together, which needs the model in memory, and this one does not fit: leave the option out"
        )
    if not calibration.held_out:
        raise OptionError(
            f"--kl-steps {steps} needs held-out text, and the layers use all of the text: lower --calibration-tokens, or name more text"
        )
    return DistillationOptions(steps=steps, seed=plan.seed, precision=precision)
