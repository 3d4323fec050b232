"""Merges the layers of a plan, for methods that work on whole layers, so that the writer finds them ready."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gqa_convert._version import __version__
from gqa_convert.checkpoint.provenance import FOUND, CalibrationRecord, Divergence
from gqa_convert.conversion.calibration.batches import prepare_calibration
from gqa_convert.conversion.layers.layer_store import (
    HALFWAY,
    TOGETHER,
    LayerRecord,
    LayerStore,
    SharedStore,
    layer_key,
)
from gqa_convert.conversion.layers.source_layers import open_layers
from gqa_convert.conversion.options import CalibrationOptions, steps_per_layer
from gqa_convert.conversion.plan import Plan
from gqa_convert.conversion.progress import (
    ALL_TOGETHER,
    MERGING_LAYERS,
    FitProgress,
    OnProgress,
)
from gqa_convert.conversion.resources import LAST_STAGE, Decisions, decide, holds_halves
from gqa_convert.errors import (
    DeviceMemoryError,
    LaunchError,
    NoSpaceError,
    OptionError,
    is_disk_full,
    is_out_of_memory,
)
from gqa_convert.merging.head_grouping import find_head_order, reconstruction_errors, reorder_heads
from gqa_convert.merging.merge_layer import Moments, merge_layer
from gqa_convert.processes import by_first, count, sharing, started
from gqa_convert.runtime.json_objects import plain
from gqa_convert.runtime.machine import chosen_device

if TYPE_CHECKING:
    from gqa_convert.conversion.calibration.streams import Calibration

_RESULT = "result"
"""The name under which what fitting came to is stored."""


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
    origin = plan.checkpoint.origin
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
    store = stack.enter_context(LayerStore(out, fingerprint, keep=options.has_data))
    if not options.has_data:
        merge_layers(plan, store, on_progress)
    else:
        device = chosen_device(options.device)
        if started() > 1 and options.device not in (None, "cpu"):
            raise OptionError(
                f"--device {options.device} is one device, and each of the {started()} processes has its own: leave it out"
            )
        with _explained_errors(out.parent):
            record = _merge_on_data(plan, store, options, on_progress)
    files: dict[str, Path] = {}
    errors: dict[str, float] = {}
    head_order = {}
    for number in range(len(plan.merged_layers)):
        layer = store.layer(number)
        assert layer is not None
        files |= store.files(layer_key(number))
        errors |= layer.errors
        if layer.head_order != sorted(layer.head_order):
            head_order[layer.module] = layer.head_order
    if store.record(TOGETHER) is not None:
        files |= store.files(TOGETHER)
    return PreparedLayers(files, errors, record, head_order, device)


def merge_layers(plan: Plan, store: LayerStore, on_progress: OnProgress) -> None:
    """Merge every layer by the plan's method, from the weights alone, with one layer in memory at a time.

    Args:
        plan: of method `factor`.
        store: where merged layers go; those that it holds already are not merged again.
        on_progress: called as each is done.

    Raises:
        NonFiniteError: a tensor holds NaN or Inf, or would hold numbers too large for its type.
    """
    with open_layers(plan) as read_layer:
        for number, (layer, groups) in enumerate(plan.merged_layers):
            record = store.layer(number)
            if record is None:
                source, unmeasured = read_layer(layer), Moments()
                heads = source.layout.split_heads(source.tensors)
                order = find_head_order(heads, groups, source.limits, unmeasured)
                heads = reorder_heads(heads, order)
                merged = merge_layer(heads, groups, source.limits, unmeasured)
                keys, values = reconstruction_errors(heads, merged, source.limits, unmeasured)
                errors = {f"{layer.module}.keys": keys, f"{layer.module}.values": values}
                record = LayerRecord(layer.module, errors, order.tolist())
                wide = {name: array.astype(np.float64) for name, array in source.tensors.items()}
                tensors = source.layout.in_result_types(
                    source.layout.merge_heads(merged, wide, groups)
                )
                store.write(layer_key(number), tensors, asdict(record))
            on_progress(
                FitProgress(MERGING_LAYERS, number + 1, len(plan.merged_layers), layer=record)
            )


def _merge_on_data(
    plan: Plan, store: LayerStore, options: CalibrationOptions, on_progress: OnProgress
) -> CalibrationRecord:
    """Merge the layers on calibration data, by what the run that began the work has decided; returns its record.

    Raises:
        OptionError: `kl_steps` is given, and the layers use all of the text.
        OutputError: the store holds layers of other data.
        GQAConvertError: as `prepare_calibration` and `fit_checkpoint`.
    """
    tell = partial(FitProgress, MERGING_LAYERS, 0, len(plan.merged_layers))
    decisions = Decisions(**store.settle("decisions", asdict(decide(plan, options))))
    left_out = [*decisions.left_out(plan, options)]
    on_progress(tell("reading the text", note=_left_out_note(left_out)))
    calibration = prepare_calibration(
        plan,
        options,
        lambda label, done, total: on_progress(FitProgress(label, done, total)),
        decisions,
    )
    steps = decisions.last_stage_steps(plan, options)
    more = [*calibration.left_out]
    if not calibration.held_out:
        problem = "the layers use all of the text: lower --calibration-tokens, or name more text"
        if steps and options.kl_steps is not None:
            raise OptionError(
                f"--kl-steps {steps} trains all layers together on text of its own, and {problem}"
            )
        if steps:
            more.append(f"{LAST_STAGE}, because {problem}")
        more.append(f"the divergence from the source, because {problem}")
        steps = 0
    record = CalibrationRecord(
        text=calibration.description,
        tokens=calibration.tokens,
        sequence_length=calibration.sequence_length,
        seed=options.seed,
        steps=steps_per_layer(options) if plan.merge_method.trains else 0,
        digest=calibration.digest,
    )
    store.check("text", record.inputs())
    mixed = None
    if calibration.mixed_in:
        mixed = f"mixed into the calibration text, so that other kinds of text are kept too: {calibration.mixed_in} (--no-mix leaves them out)"
    again = None
    if steps and decisions.recompute:
        again = "the last stage computes activations again in its backward passes, since the free memory does not hold them; the result is the same"
    shared = f"{started()} processes divide the blocks among them" if started() > 1 else None
    for note in (mixed, calibration.warning, _left_out_note(more), again, shared):
        on_progress(tell(note=note))
    record = replace(record, left_out=(*left_out, *more))
    with sharing(_fit_with_first, plan, calibration, options, record, steps, decisions.recompute):
        return fit_checkpoint(
            plan,
            store,
            calibration,
            options,
            on_progress,
            record,
            steps,
            recompute=decisions.recompute,
        )


def _fit_with_first(
    plan: Plan,
    calibration: "Calibration",
    options: CalibrationOptions,
    record: CalibrationRecord,
    steps: int,
    recompute: bool,
) -> None:
    """What all processes but the first do while this one fits a checkpoint: the same on their rows of the text."""
    fit_checkpoint(
        plan, None, calibration, options, lambda progress: None, record, steps, recompute=recompute
    )


def _check_shares(rows: int) -> None:
    """Refuse more processes than rows.

    Raises:
        LaunchError: some process would have nothing to read.
    """
    if rows < count():
        raise LaunchError(
            f"{count()} processes cannot share {rows} blocks of calibration text: start at most {rows}"
        )


def _left_out_note(sentences: Sequence[str]) -> str | None:
    return f"left out: {'; and '.join(sentences)}" if sentences else None


def fit_checkpoint(
    plan: Plan,
    files: LayerStore | None,
    calibration: "Calibration",
    options: CalibrationOptions,
    on_progress: OnProgress,
    record: CalibrationRecord,
    steps: int,
    *,
    recompute: bool = False,
) -> CalibrationRecord:
    """Load the source, fit every layer, train all layers together, and measure the result on held-out text.

    Several processes divide the rows of each batch, and add their sums and gradients. The first one decides, and writes.

    Args:
        plan: of the conversion, of a method that takes calibration data.
        files: where merged layers go; those that it holds already are not merged again. The last stage is stored whole.
            None on all processes but the first.
        calibration: the batches.
        options: of calibration.
        on_progress: called as the work goes on.
        record: of the calibration.
        steps: that train all layers together; 0 for none.
        recompute: see `Decisions`.

    Returns:
        The record with what was done and measured.

    Raises:
        NoSpaceError: the disk cannot hold the merged layers.
        DeviceMemoryError: the memory is too small.
        LaunchError: there are fewer rows than processes.
        OptionError: the model is too large for these steps, whoever decided on them.
        NonFiniteError: a tensor of the source holds NaN or Inf, or the source yields it on the data.
        UnsupportedFamilyError: the loaded modules' parameters are not the checkpoint's tensors.
    """
    from gqa_convert.conversion.calibration.streams import digest_of, tokens_of
    from gqa_convert.conversion.layers import last_stage
    from gqa_convert.conversion.layers.attention_calls import beginnings
    from gqa_convert.conversion.layers.last_stage import LastStage, Student, train_together
    from gqa_convert.conversion.layers.layer_fitting import fit_layers, measure_divergence
    from gqa_convert.conversion.layers.model_loading import open_model, precision_of, running_device
    from gqa_convert.conversion.layers.one_layer import FitOptions

    store, held_out, is_asked = (
        SharedStore(files),
        calibration.held_out,
        options.kl_steps is not None,
    )
    request = {"steps": options.kl_steps, "data": digest_of([], [*calibration.fresh, *held_out])}
    finished = store.record(_RESULT)
    is_whole = all(store.layer(number) is not None for number in range(len(plan.merged_layers)))
    if finished is not None and is_whole and finished.pop("request") == request:
        kl = Divergence(**finished["kl"]) if finished["kl"] else None
        return replace(
            record, kl_steps=finished["kl_steps"], kl=kl, left_out=tuple(finished["left_out"])
        )
    store.discard(_RESULT)
    store.discard(TOGETHER)
    if not is_whole:
        store.discard(HALFWAY)  # it began with other layers
    on_progress(FitProgress(MERGING_LAYERS, 0, len(plan.merged_layers), "loading the source"))
    device = chosen_device(options.device)
    model = open_model(
        plan.checkpoint.local_folder, device=device, halves=holds_halves(plan, device)
    )
    if steps and any(parameter.is_meta for parameter in model.parameters()):  # offloaded
        raise OptionError(
            f"{LAST_STAGE}, needs the model in memory, and it does not fit now: free memory, or leave the stage out "
            "with --kl-steps 0, and run the same command again, which resumes from the finished layers"
        )
    learned, validation = calibration.fitted, calibration.validation
    fitted, validating = (
        [*part, *beginnings(part, calibration.batches)] for part in (learned, validation)
    )
    by_first(partial(_check_shares, sum(len(tokens_of(batch)) for batch in fitted)))
    fitting = FitOptions(
        method=plan.merge_method,
        steps=steps_per_layer(options),
        seed=plan.seed,
        validation=len(validating),
        precision=precision_of(plan, running_device(model)),
    )
    fit_layers(plan, store, model, [*fitted, *validating], fitting, on_progress)
    at_end = partial(FitProgress, ALL_TOGETHER, steps, steps)
    if held_out:
        on_progress(at_end("measuring the result"))
        tokens = sum(tokens_of(batch).numel() for batch in held_out)
        before = measure_divergence(plan, store, model, held_out)
        record = replace(
            record,
            kl=Divergence(before, before, f"{tokens:,} held-out tokens of {calibration.label}"),
        )
    if steps:
        texts = [*calibration.fresh, *learned], validation or learned
        try:
            student = Student(plan, store, model, fitting.precision, recompute=recompute)
            stage = LastStage(
                steps=steps,
                seed=options.seed,
                least=0.0 if is_asked else last_stage.WORTHWHILE,
                request=request,
            )
            steps, trained = train_together(student, store, *texts, stage, on_progress)
            if trained is not None:
                store.write(TOGETHER, student.tensors(trained), {})
            store.discard(HALFWAY)
        except (MemoryError, RuntimeError) as problem:
            if is_asked or not is_out_of_memory(problem):
                raise
            steps, sentence = 0, f"{LAST_STAGE}, because it ran out of memory"
            on_progress(at_end(note=_left_out_note([sentence])))
            record = replace(record, left_out=(*record.left_out, sentence))
        if record.kl is not None and store.record(TOGETHER) is not None:
            record = replace(
                record,
                kl=replace(record.kl, after=measure_divergence(plan, store, model, held_out)),
            )
    record = replace(record, kl_steps=steps)
    on_progress(at_end(kl=record.kl))
    store.write(
        _RESULT, {}, {"request": request} | {key: plain(getattr(record, key)) for key in FOUND}
    )
    return record


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
