"""Merges the layers of a plan, for methods that work on whole layers, so that the writer finds them
ready.

From the weights alone, that is one layer after the other. On calibration data, the free memory
decides what is done; the text is read; the layers are fitted, one after the other; the last stage
trains all of them together; and the result is measured on text that decided nothing. What is
finished is kept in files, from which a killed run resumes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from gqa_convert.conversion.layers.source_layers import SourceLayer, open_layers
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
from gqa_convert.families.loading import read_kind
from gqa_convert.merging.attention_heads import Tensors
from gqa_convert.merging.head_grouping import (
    find_head_order,
    reconstruction_errors,
    reorder_heads,
)
from gqa_convert.merging.merge_layer import Moments, merge_layer
from gqa_convert.processes import by_first, count, sharing, started
from gqa_convert.runtime.json_objects import JsonObject, plain
from gqa_convert.runtime.machine import chosen_device

if TYPE_CHECKING:
    from gqa_convert.conversion.calibration.streams import Calibration

_RESULT = "result"
"""The name under which what fitting came to is stored."""
_AGAIN = "and run the same command again, which resumes from the finished layers"


@dataclass(frozen=True, slots=True)
class PreparedLayers:
    """Layers that were merged before the writer runs, and what the result's record says of them.

    Attributes:
        tensors: by the names of the result's tensors: the file that holds each.
        errors: by the names of tensors, or of modules and parts of them.
        calibration: what the source was run on.
        head_order: by module: the source's K/V heads in the order in which they were merged, where
            it is not the source's.
        device: on which the work was done.
    """

    tensors: Mapping[str, Path] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    calibration: CalibrationRecord | None = None
    head_order: dict[str, list[int]] = field(default_factory=dict)
    device: str = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class FitWork:
    """What is to be fitted, and how, as the first process has decided it for all.

    Attributes:
        plan: of the conversion, of a method that takes calibration data.
        options: of calibration.
        calibration: the batches.
        record: what is known of the calibration before the work.
        steps: that train all layers together; 0 for none.
        decisions: by the free memory, of the run that began the work.
    """

    plan: Plan
    options: CalibrationOptions
    calibration: "Calibration"
    record: CalibrationRecord
    steps: int
    decisions: Decisions = field(default_factory=Decisions)


def prepare_layers(
    plan: Plan, out: Path, options: CalibrationOptions, stack: ExitStack, on_progress: OnProgress
) -> PreparedLayers:
    """Merge every layer of a plan whose method works on whole layers; of any other plan none.

    Args:
        plan: of a local checkpoint.
        out: the folder of the result. Merged layers lie in a hidden folder beside it until `stack`
            is closed; those that were measured on calibration data stay there after an error, so
            that the next run resumes.
        options: of calibration.
        stack: closed once the result is written.
        on_progress: called as the work goes on.

    Raises:
        GQAConvertError: one of its subclasses.
    """
    if not plan.merge_method.merges_layers:
        return PreparedLayers()
    store = stack.enter_context(LayerStore(out, _fingerprint(plan), keep=options.has_data))
    if not options.has_data:
        _merge_weights(plan, store, on_progress)
        return _collected(plan, store, None, "cpu")
    device = chosen_device(options.device)
    if started() > 1 and options.device not in (None, "cpu"):
        raise OptionError(
            f"--device {options.device} is one device, and each of the {started()} processes has "
            "its own: leave it out"
        )
    with _explained_errors(out.parent):
        work = _prepare_work(plan, store, options, on_progress)
        with sharing(fit_checkpoint, work):
            record = fit_checkpoint(work, store, on_progress)
    return _collected(plan, store, record, device)


def _fingerprint(plan: Plan) -> JsonObject:
    """What merged layers depend on beside calibration data."""
    origin = plan.checkpoint.origin
    return {
        "version": __version__,
        "source": str(origin.folder),
        "files": [[shard.file, shard.size, shard.modified_ns] for shard in origin.shards],
        "config": plan.checkpoint.config,
        "method": plan.method,
        "groups": plan.stated_groups,
        "modules": [layer.module for layer in plan.layers],
    }


def _collected(
    plan: Plan, store: LayerStore, record: CalibrationRecord | None, device: str
) -> PreparedLayers:
    """What the store holds of all layers of a plan."""
    files: dict[str, Path] = {}
    errors: dict[str, float] = {}
    head_order: dict[str, list[int]] = {}
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


# From the weights alone


def _merge_weights(plan: Plan, store: LayerStore, on_progress: OnProgress) -> None:
    """Merge every layer by the plan's method, with one layer in memory at a time. Needs no torch.

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
                tensors, record = _merged_by_weights(read_layer(layer), groups)
                store.write(layer_key(number), tensors, asdict(record))
            done = number + 1
            on_progress(FitProgress(MERGING_LAYERS, done, len(plan.merged_layers), layer=record))


def _merged_by_weights(source: SourceLayer, groups: int) -> tuple[Tensors, LayerRecord]:
    """The tensors of a merged layer as they are published, and its record."""
    limits, unmeasured = source.limits, Moments()
    heads = source.layout.split_heads(source.tensors)
    order = find_head_order(heads, groups, limits, unmeasured)
    heads = reorder_heads(heads, order)
    merged = merge_layer(heads, groups, limits, unmeasured)
    keys, values = reconstruction_errors(heads, merged, limits, unmeasured)
    module = source.layout.layer.module
    errors = {f"{module}.keys": keys, f"{module}.values": values}
    wide = {name: array.astype(np.float64) for name, array in source.tensors.items()}
    joined = source.layout.merge_heads(merged, wide, groups)
    return source.layout.in_result_types(joined), LayerRecord(module, errors, order.tolist())


# On calibration data


def _prepare_work(
    plan: Plan, store: LayerStore, options: CalibrationOptions, on_progress: OnProgress
) -> FitWork:
    """Read the calibration data, as the run that began the work has decided, and say what is left
    out.

    Raises:
        OptionError: `kl_steps` is given, and the layers use all of the text.
        OutputError: the store holds layers of other data.
        GQAConvertError: as `prepare_calibration`.
    """
    tell = partial(FitProgress, MERGING_LAYERS, 0, len(plan.merged_layers))
    decisions = Decisions(**store.settle("decisions", asdict(decide(plan, options))))
    left_out = decisions.left_out(plan, options)
    reading = f"reading the {read_kind(plan.checkpoint.config)}"
    on_progress(tell(reading, note=_left_out_note(left_out)))
    calibration = prepare_calibration(
        plan,
        options,
        lambda label, done, total: on_progress(FitProgress(label, done, total)),
        decisions,
    )
    steps = decisions.last_stage_steps(plan, options)
    more = [*calibration.left_out]
    if not calibration.held_out:
        more += _lacks_of_held_out(read_kind(plan.checkpoint.config), steps, options)
        steps = 0
    record = CalibrationRecord(
        text=calibration.description,
        tokens=calibration.tokens,
        sequence_length=calibration.sequence_length,
        seed=options.seed,
        steps=steps_per_layer(options) if plan.merge_method.trains else 0,
        digest=calibration.digest,
        left_out=(*left_out, *more),
    )
    store.check("text", record.inputs())
    mixed = again = shared = sharded = None
    if calibration.mixed_in:
        mixed = (
            "mixed into the calibration text, so that other kinds of text are kept too: "
            f"{calibration.mixed_in} (--no-mix leaves them out)"
        )
    if steps and decisions.recompute:
        again = (
            "the last stage computes activations again in its backward passes, since the free "
            "memory does not hold them; the result is the same"
        )
    if started() > 1:
        shared = f"{started()} processes divide the blocks among them"
        if steps and decisions.sharded:
            sharded = (
                f"each of {started()} processes holds a share of the weights and of what the last "
                "stage trains, since one device does not hold them"
            )
    for note in (mixed, calibration.warning, _left_out_note(more), again, shared, sharded):
        on_progress(tell(note=note))
    return FitWork(
        plan=plan,
        options=options,
        calibration=calibration,
        record=replace(record, sharded=sharded or ""),
        steps=steps,
        decisions=decisions,
    )


def _lacks_of_held_out(data: str, steps: int, options: CalibrationOptions) -> list[str]:
    """What is left out where the layers use all of the text, or of the sounds."""
    problem = f"the layers use all of the {data}: lower --calibration-tokens, or name more {data}"
    if steps and options.kl_steps is not None:
        raise OptionError(
            f"--kl-steps {steps} trains all layers together on {data} of its own, and {problem}"
        )
    stage = [f"{LAST_STAGE}, because {problem}"] if steps else []
    return [*stage, f"the divergence from the source, because {problem}"]


def _left_out_note(sentences: Sequence[str]) -> str | None:
    return f"left out: {'; and '.join(sentences)}" if sentences else None


def fit_checkpoint(
    work: FitWork,
    files: LayerStore | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> CalibrationRecord:
    """Load the source, fit every layer, train all layers together, and measure the result on
    held-out text.

    Several processes divide the rows of each batch, and add their sums and gradients. The first one
    decides, and writes.

    Args:
        work: what is to be done.
        files: where merged layers go; those that it holds already are not merged again. The last
            stage is stored whole. None on all processes but the first.
        on_progress: called as the work goes on.

    Returns:
        The record with what was done and measured.

    Raises:
        NoSpaceError: the disk cannot hold the merged layers.
        DeviceMemoryError: the memory is too small.
        LaunchError: there are fewer rows than processes.
        OptionError: the model is too large for the last stage, whoever decided on it.
        NonFiniteError: a tensor of the source holds NaN or Inf, or the source yields it on the
            data.
        UnsupportedFamilyError: the loaded modules' parameters are not the checkpoint's tensors.
    """
    from gqa_convert.conversion.calibration.streams import digest_of, tokens_of
    from gqa_convert.conversion.layers.layer_fitting import measure_divergence

    # what an earlier run has finished
    plan, store, held_out = work.plan, SharedStore(files), work.calibration.held_out
    later = digest_of([], [*work.calibration.fresh, *held_out])
    request = {"steps": work.options.kl_steps, "data": later}
    is_whole = all(store.layer(number) is not None for number in range(len(plan.merged_layers)))
    finished = store.record(_RESULT)
    if finished is not None and is_whole and finished.pop("request") == request:
        return _restored(work.record, finished)
    store.discard(_RESULT)
    store.discard(TOGETHER)
    if not is_whole:
        store.discard(HALFWAY)  # it began with other layers
    # the layers, and what they lose
    on_progress(FitProgress(MERGING_LAYERS, 0, len(plan.merged_layers), "loading the source"))
    model = _load_source(work)
    _fit_layers(work, store, model, on_progress)
    at_end = partial(FitProgress, ALL_TOGETHER, work.steps, work.steps)
    on_host = work.decisions.on_host
    measured = partial(measure_divergence, plan, store, model, held_out, on_host=on_host)
    kl = None
    if held_out:
        on_progress(at_end("measuring the result"))
        tokens = sum(tokens_of(batch).numel() for batch in held_out)
        text = f"{tokens:,} held-out tokens of {work.calibration.label}"
        before = measured()
        kl = Divergence(before, before, text)
    # all of them together, and what that gains
    steps, left_out = work.steps, work.record.left_out
    if steps:
        try:
            steps = _train_together(work, store, model, request, on_progress)
        except (MemoryError, RuntimeError) as problem:
            # other processes wait for this one, unless it ends
            is_needed = work.options.kl_steps is not None or count() > 1
            if is_needed or not is_out_of_memory(problem):
                raise
            steps, sentence = 0, f"{LAST_STAGE}, because it ran out of memory"
            left_out = (*left_out, sentence)
            on_progress(at_end(note=_left_out_note([sentence])))
        if kl is not None and store.record(TOGETHER) is not None:
            kl = replace(kl, after=measured())
    # the record
    record = replace(work.record, kl_steps=steps, kl=kl, left_out=left_out)
    on_progress(at_end(kl=kl))
    found = {key: plain(getattr(record, key)) for key in FOUND}
    store.write(_RESULT, {}, {"request": request} | found)
    return record


def _restored(record: CalibrationRecord, found: JsonObject) -> CalibrationRecord:
    """The record with what an earlier run has measured."""
    kl = Divergence(**found["kl"]) if found["kl"] else None
    return replace(record, kl_steps=found["kl_steps"], kl=kl, left_out=tuple(found["left_out"]))


def _load_source(work: FitWork) -> Any:
    """The loaded source.

    Raises:
        OptionError: the last stage needs it in memory, where it is not.
    """
    from gqa_convert.conversion.layers.model_loading import open_model

    device = chosen_device(work.options.device)
    halves = holds_halves(work.plan, device)
    folder, sharded = work.plan.checkpoint.local_folder, bool(work.record.sharded)
    model = open_model(folder, device=device, halves=halves, sharded=sharded)
    is_offloaded = any(parameter.is_meta for parameter in model.parameters())
    if work.steps and is_offloaded:
        raise OptionError(
            f"{LAST_STAGE}, needs the model in memory, and it does not fit now: free memory, or "
            f"leave the stage out with --kl-steps 0, {_AGAIN}"
        )
    return model


def _fit_layers(work: FitWork, store: SharedStore, model: Any, on_progress: OnProgress) -> None:
    """Fit the layers on the batches and on beginnings of their blocks, some of them held out."""
    from gqa_convert.conversion.calibration.streams import tokens_of
    from gqa_convert.conversion.layers.attention_calls import beginnings
    from gqa_convert.conversion.layers.layer_fitting import fit_layers
    from gqa_convert.conversion.layers.model_loading import precision_of, running_device
    from gqa_convert.conversion.layers.one_layer import FitOptions

    data = work.calibration
    fitted = [*data.fitted, *beginnings(data.fitted, data.batches)]
    validating = [*data.validation, *beginnings(data.validation, data.batches)]
    by_first(partial(_check_shares, sum(len(tokens_of(batch)) for batch in fitted)))
    options = FitOptions(
        method=work.plan.merge_method,
        steps=steps_per_layer(work.options),
        seed=work.plan.seed,
        validation=len(validating),
        precision=precision_of(work.plan, running_device(model)),
        on_host=work.decisions.on_host,
    )
    fit_layers(work.plan, store, model, [*fitted, *validating], options, on_progress)


def _check_shares(rows: int) -> None:
    """Refuse more processes than rows.

    Raises:
        LaunchError: some process would have nothing to read.
    """
    if rows < count():
        raise LaunchError(
            f"{count()} processes cannot share {rows} blocks of calibration text: start at most "
            f"{rows}"
        )


def _train_together(
    work: FitWork, store: SharedStore, model: Any, request: JsonObject, on_progress: OnProgress
) -> int:
    """Train all layers together, and store them if that helped; returns the steps taken."""
    from gqa_convert.conversion.layers import last_stage
    from gqa_convert.conversion.layers.last_stage import LastStage, Student, train_together
    from gqa_convert.conversion.layers.model_loading import precision_of, running_device

    data = work.calibration
    precision = precision_of(work.plan, running_device(model))
    recompute = work.decisions.recompute
    student = Student(work.plan, store, model, precision, recompute=recompute)
    stage = LastStage(
        steps=work.steps,
        seed=work.options.seed,
        least=last_stage.WORTHWHILE if work.options.kl_steps is None else 0.0,
        request=request,
    )
    learned, validation = [*data.fresh, *data.fitted], data.validation or data.fitted
    steps, is_better = train_together(student, store, learned, validation, stage, on_progress)
    if is_better:
        store.write(TOGETHER, student.tensors(), {})
    store.discard(HALFWAY)
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
    try:
        yield
    except OSError as problem:
        if not is_disk_full(problem):
            raise
        full = Path(problem.filename).parent if problem.filename else folder
        raise NoSpaceError(f"the disk or quota of {full} is full: make room, {_AGAIN}") from None
    except (MemoryError, RuntimeError) as problem:
        if not is_out_of_memory(problem):
            raise
        raise DeviceMemoryError(
            "out of memory: lower --calibration-tokens or --calibration-length (which fits all "
            "layers anew), or leave the last stage out with --kl-steps 0, or stop what else uses "
            f"the GPU, or hide the GPU with CUDA_VISIBLE_DEVICES=, {_AGAIN}"
        ) from None
