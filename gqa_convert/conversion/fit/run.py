"""Merges the layers of a plan, for methods that work on whole layers, so that the writer finds them ready."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gqa_convert._version import __version__
from gqa_convert.checkpoint.devices import chosen_device
from gqa_convert.checkpoint.provenance import CalibrationRecord, Divergence
from gqa_convert.checkpoint.resource_errors import is_disk_full, is_out_of_memory
from gqa_convert.conversion.fit.batches import prepare_calibration
from gqa_convert.conversion.fit.from_weights import merge_layers
from gqa_convert.conversion.fit.layer_store import LayerStore, layer_key
from gqa_convert.conversion.fit.memory import trains_together
from gqa_convert.conversion.fit.options import CalibrationOptions, steps_per_layer, steps_together
from gqa_convert.conversion.fit.progress import ALL_TOGETHER, MERGING_LAYERS, FitProgress, OnProgress
from gqa_convert.conversion.plan import Plan
from gqa_convert.errors import DeviceMemoryError, NoSpaceError, OptionError

if TYPE_CHECKING:
    from gqa_convert.conversion.fit.calibration_text import Calibration

_TOGETHER = "together"
"""The name under which the last stage is stored."""


@dataclass(frozen=True, slots=True)
class PreparedLayers:
    """Layers that were merged before the writer runs, and what the result's record says of them.

    Attributes:
        tensors: by the names of the result's tensors: the file that holds each.
        errors: by name; None where the writer merges, and measures the errors itself.
        calibration: what the source was run on.
        head_order: by module: the source's K/V heads in the order in which they were merged, where it is not the
            source's.
        device: on which the work was done.
    """

    tensors: Mapping[str, Path] = field(default_factory=dict)
    errors: Mapping[str, float] | None = None
    calibration: CalibrationRecord | None = None
    head_order: Mapping[str, list[int]] = field(default_factory=dict)
    device: str = "cpu"


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
    origin, count = plan.checkpoint.origin, len(plan.merged_layers)
    fingerprint = {
        "version": __version__,
        "source": str(origin.folder),
        "files": [[shard.file, shard.size, shard.modified_ns] for shard in origin.shards],
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
        with _explained_errors(out.parent):
            calibration = prepare_calibration(
                plan, options, lambda label, done, total: on_progress(FitProgress(label, done, total))
            )
        record = CalibrationRecord(
            text=calibration.description,
            tokens=calibration.tokens,
            sequence_length=calibration.sequence_length,
            seed=options.seed,
            steps=steps_per_layer(options) if plan.merge_method.trains else 0,
            digest=calibration.digest,
        )
        store = stack.enter_context(LayerStore(out, fingerprint | record.inputs(), keep=True))
        device = chosen_device(options.device)
        kl_steps, kl = fit_checkpoint(plan, store, calibration, options, on_progress)
        record = replace(record, kl_steps=kl_steps, kl=kl)
    files: dict[str, Path] = {}
    errors: dict[str, float] = {}
    head_order = {}
    for number in range(count):
        layer = store.layer(number)
        assert layer is not None
        files |= store.files(layer_key(number))
        errors |= layer.errors
        if layer.head_order != sorted(layer.head_order):
            head_order[layer.module] = layer.head_order
    if store.record(_TOGETHER) is not None:
        files |= store.files(_TOGETHER)
    return PreparedLayers(files, errors, record, head_order, device)


def fit_checkpoint(
    plan: Plan, store: LayerStore, calibration: "Calibration", options: CalibrationOptions, on_progress: OnProgress
) -> tuple[int, Divergence]:
    """Load the source, fit every layer, then train all layers together where that is possible.

    Args:
        plan: of the conversion, of a method that takes calibration data.
        store: where merged layers go; those that it holds already are not merged again. The last stage is stored whole.
        calibration: the batches. Without held-out ones the last stage is left out.
        options: of calibration.
        on_progress: called as the work goes on.

    Returns:
        The steps of the last stage, 0 where it was left out or the divergence was too small to be worth its time; and the
        divergence before and after it.

    Raises:
        NoSpaceError: the disk cannot hold the merged layers.
        DeviceMemoryError: the memory is too small.
        OptionError: `kl_steps` is given, and all layers cannot be trained together.
        NonFiniteError: a tensor of the source holds NaN or Inf.
        UnsupportedFamilyError: the loaded modules' parameters are not the checkpoint's tensors.
    """
    from gqa_convert.conversion.fit.calibration_text import digest_of
    from gqa_convert.conversion.fit.distillation import WORTHWHILE, Student, train_together
    from gqa_convert.conversion.fit.layer_fitting import fit_layers
    from gqa_convert.conversion.fit.model_loading import open_model, precision_of, running_device
    from gqa_convert.conversion.fit.one_layer import FitOptions

    count = len(plan.merged_layers)
    request = {"kl_steps": options.kl_steps, "data": digest_of([], [*calibration.fresh, *calibration.held_out])}
    finished = store.record(_TOGETHER)
    is_whole = all(store.layer(number) is not None for number in range(count))
    if finished is not None and is_whole and finished["request"] == request:
        return finished["kl_steps"], Divergence(**finished["kl"])
    store.discard(_TOGETHER)
    with _explained_errors(store.path.parent):
        on_progress(FitProgress(MERGING_LAYERS, 0, count, "loading the source"))
        model = open_model(plan.checkpoint.local_folder, device=chosen_device(options.device))
        steps = _last_stage_steps(plan, model, calibration, options)
        for note in (calibration.note, calibration.warning):
            if note is not None:
                on_progress(FitProgress(MERGING_LAYERS, 0, count, note=note))
        fitting = FitOptions(
            method=plan.merge_method,
            steps=steps_per_layer(options),
            seed=plan.seed,
            precision=precision_of(plan, running_device(model)),
        )
        divergence = fit_layers(plan, store, model, calibration.batches, fitting, on_progress)
        if not steps:
            return 0, Divergence(divergence, divergence)
        student = Student(plan, store, model, fitting.precision)
        learned = [*calibration.fresh, *calibration.batches]
        least = WORTHWHILE if options.kl_steps is None else 0.0
        trained, kl = train_together(student, learned, calibration.held_out, steps, plan.seed, least, on_progress)
        if kl.before < least:
            steps = 0
        record = {"request": request, "kl_steps": steps, "kl": asdict(kl)}
        store.write(_TOGETHER, {} if trained is None else student.tensors(trained), record)
        on_progress(FitProgress(ALL_TOGETHER, steps, steps, kl=kl))
        return steps, kl


def _last_stage_steps(plan: Plan, model: Any, calibration: "Calibration", options: CalibrationOptions) -> int:
    """How many steps train all layers together; 0 to leave the stage out.

    Raises:
        OptionError: `kl_steps` is given, and the stage is impossible.
    """
    from gqa_convert.conversion.fit.model_loading import running_device

    steps, is_asked = steps_together(options), options.kl_steps is not None
    if not plan.merge_method.trains or not steps:
        return 0
    problem = None
    if any(parameter.is_meta for parameter in model.parameters()):  # offloaded
        problem = "the model in memory, and this one does not fit: leave the option out"
    elif not calibration.held_out:
        problem = "held-out text, and the layers use all of the text: lower --calibration-tokens, or name more text"
    if problem and is_asked:
        raise OptionError(f"--kl-steps {steps} trains all layers together, which needs {problem}")
    if problem or not (is_asked or trains_together(plan, calibration.sequence_length, str(running_device(model)))):
        return 0
    return steps


@contextmanager
def _explained_errors(folder: Path) -> Iterator[None]:
    """Translate a full disk or memory.

    Args:
        folder: where the work is kept, unless the error says otherwise.

    Raises:
        NoSpaceError: the disk is full.
        DeviceMemoryError: the memory of the GPU or of the machine is full.
    """
    again = "and run the same command again, which resumes from the finished layers"
    try:
        yield
    except OSError as problem:
        if not is_disk_full(problem):
            raise
        full = Path(problem.filename).parent if problem.filename else folder
        raise NoSpaceError(f"the disk or quota of {full} is full: make room, {again}") from None
    except (MemoryError, RuntimeError) as problem:
        if not is_out_of_memory(problem):
            raise
        raise DeviceMemoryError(
            f"out of memory: lower --calibration-tokens or --calibration-length (which fits all layers anew), or leave the last stage out with --kl-steps 0, or stop what else uses the GPU, or hide the GPU with CUDA_VISIBLE_DEVICES=, {again}"
        ) from None
