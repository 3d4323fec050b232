"""Fits the layers of a plan on calibration data.

The free memory decides what is done; the text is read; the layers are fitted, one after the other;
the last stage trains all of them together; and the result is measured on text that decided nothing.
What is finished is kept in files, from which a killed run resumes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.provenance import FOUND, CalibrationRecord, Divergence
from gqa_convert.errors import (
    DeviceMemoryError,
    LaunchError,
    NoSpaceError,
    OptionError,
    is_disk_full,
    is_out_of_memory,
)
from gqa_convert.families.loading import read_kind
from gqa_convert.processes import by_first, count, sharing, started
from gqa_convert.runtime.json_objects import JsonObject, plain
from gqa_convert.runtime.machine import chosen_device

from .calibration.batches import prepare_calibration
from .calibration.streams import Calibration, digest_of, tokens_of
from .layers import last_stage, model_loading
from .layers.attention_calls import beginnings
from .layers.layer_fitting import fit_layers, measure_divergence
from .layers.layer_store import HALFWAY, TOGETHER, LayerStore, SharedStore
from .layers.one_layer import FitOptions
from .layers.optimizer import batch_order
from .options import CalibrationOptions, steps_per_layer
from .plan import Plan
from .progress import ALL_TOGETHER, MERGING_LAYERS, FitProgress, OnProgress
from .resources import LAST_STAGE, Decisions, decide, half_type

_RESULT = "result"
"""The name under which what fitting came to is stored."""
_AGAIN = "and run the same command again, which resumes from the finished layers"


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
    calibration: Calibration
    record: CalibrationRecord
    steps: int
    decisions: Decisions = field(default_factory=Decisions)


def fit_on_data(
    plan: Plan, store: LayerStore, options: CalibrationOptions, on_progress: OnProgress
) -> CalibrationRecord:
    """Merge every layer of a plan on calibration data, with all processes of this run.

    Args:
        plan: of a local checkpoint, of a method that takes such data.
        store: where merged layers go.
        options: of calibration.
        on_progress: called as the work goes on.

    Returns:
        What was done and measured.

    Raises:
        GQAConvertError: one of its subclasses.
    """
    if started() > 1 and options.device not in (None, "cpu"):
        raise OptionError(
            f"--device {options.device} is one device, and each of the {started()} processes has "
            "its own: leave it out"
        )
    with _explained_errors(store.path.parent):
        work = _prepare_work(plan, store, options, on_progress)
        with sharing(fit_checkpoint, work):
            return fit_checkpoint(work, store, on_progress)


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
    data = read_kind(plan.checkpoint.config)
    on_progress(tell(f"reading the {data}", note=_left_out_note(left_out)))
    calibration = prepare_calibration(
        plan,
        options,
        lambda label, done, total: on_progress(FitProgress(label, done, total)),
        decisions,
    )
    steps = decisions.last_stage_steps(plan, options)
    more = [*calibration.left_out]
    if not calibration.held_out:
        more += _lacks_of_held_out(data, steps, options)
        steps = 0
    record = CalibrationRecord(
        text=calibration.description,
        tokens=calibration.tokens,
        sequence_length=calibration.sequence_length,
        seed=options.seed,
        steps=steps_per_layer(options) if plan.merge_method.trains else 0,
        digest=calibration.digest,
        in_bfloat16=decisions.in_bfloat16,
        left_out=(*left_out, *more),
    )
    store.check("text", record.inputs())
    notes = [calibration.warning, _left_out_note(more)]
    if calibration.mixed_in:
        notes.append(
            "mixed into the calibration text, so that other kinds of text are kept too: "
            f"{calibration.mixed_in} (--no-mix leaves them out)"
        )
    if steps and decisions.recompute:
        notes.append(
            "the last stage computes activations again in its backward passes, since the free "
            "memory does not hold them; the result is the same"
        )
    if started() > 1:
        notes.append(f"{started()} processes divide the blocks among them")
    sharded = ""
    if started() > 1 and steps and decisions.sharded:
        sharded = (
            f"each of {started()} processes holds a share of the weights and of what the last "
            "stage trains, since one device does not hold them"
        )
        notes.append(sharded)
    for note in notes:
        on_progress(tell(note=note))
    return FitWork(
        plan=plan,
        options=options,
        calibration=calibration,
        record=replace(record, sharded=sharded),
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
    work: FitWork, files: LayerStore | None = None, on_progress: OnProgress = lambda progress: None
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
    reason: str | None = None
    if steps:
        try:
            steps, reason = _train_together(work, store, model, request, on_progress)
        except (MemoryError, RuntimeError) as problem:
            # other processes wait for this one, unless it ends
            is_needed = work.options.kl_steps is not None or count() > 1
            if is_needed or not is_out_of_memory(problem):
                raise
            steps, reason = 0, "it ran out of memory"
        if reason is not None:
            sentence = f"{LAST_STAGE}, because {reason}"
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
    device = chosen_device(work.options.device)
    halves = work.decisions.in_bfloat16 and half_type(work.plan.checkpoint) is not None
    folder, sharded = work.plan.checkpoint.local_folder, bool(work.record.sharded)
    model = model_loading.open_model(folder, device=device, halves=halves, sharded=sharded)
    is_offloaded = any(parameter.is_meta for parameter in model.parameters())
    if work.steps and is_offloaded:
        raise OptionError(
            f"{LAST_STAGE}, needs the model in memory, and it does not fit now: free memory, or "
            f"leave the stage out with --kl-steps 0, {_AGAIN}"
        )
    return model


def _precision(work: FitWork, model: Any) -> model_loading.Precision:
    device = model_loading.running_device(model)
    return model_loading.precision_of(work.decisions.in_bfloat16, device)


def _fit_layers(work: FitWork, store: SharedStore, model: Any, on_progress: OnProgress) -> None:
    """Fit the layers on the batches and on beginnings of their blocks, some of them held out."""
    data = work.calibration
    fitted = [*data.fitted, *beginnings(data.fitted, data.batches)]
    validating = [*data.validation, *beginnings(data.validation, data.batches)]
    by_first(partial(_check_shares, sum(len(tokens_of(batch)) for batch in fitted)))
    options = FitOptions(
        method=work.plan.merge_method,
        steps=steps_per_layer(work.options),
        seed=work.options.seed,
        validation=len(validating),
        precision=_precision(work, model),
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
) -> tuple[int, str | None]:
    """Train all layers together, and store them if that helped; returns the steps taken, and why
    the layers stay as they were if they do.
    """
    data = work.calibration
    precision = _precision(work, model)
    recompute = work.decisions.recompute
    student = last_stage.Student(work.plan, store, model, precision, recompute=recompute)
    on_progress(FitProgress(ALL_TOGETHER, 0, work.steps, f"step 0 of {work.steps:,}"))
    validation = data.validation or data.fitted
    before = student.divergence(validation)
    if work.options.kl_steps is None and before < last_stage.WORTHWHILE:
        return 0, f"the result diverges by less than {last_stage.WORTHWHILE:g} nats per token"
    learned = [*data.fresh, *data.fitted]
    order = batch_order(len(learned), work.steps, work.options.seed)
    last_stage.train_together(student, store, learned, order, request, on_progress)
    after = student.divergence(validation)
    helped = after < before
    if helped:
        store.write(TOGETHER, student.tensors(), {})
    store.discard(HALFWAY)
    worse = f"it took validation text from {before:.4f} to {after:.4f} nats per token"
    return work.steps, None if helped else worse


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
