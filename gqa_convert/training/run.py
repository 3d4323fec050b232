"""A run: sets it up from its recipe and the state of its output folder, trains, and publishes the model."""

import copy
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gqa_convert.checkpoint.atomic_files import write_json
from gqa_convert.checkpoint.machine import measurement
from gqa_convert.checkpoint.provenance import PROVENANCE, earlier_record
from gqa_convert.checkpoint.publication import check_destination, sweep
from gqa_convert.data.token_files import OnTokenize
from gqa_convert.errors import ResumeError
from gqa_convert.training.checkpoints import Checkpoints, Progress, RunRecord, set_state, state_of, whole_model
from gqa_convert.training.distributed import join
from gqa_convert.training.export import export_model
from gqa_convert.training.lora import check_lora, gather_adapters, merged_model
from gqa_convert.training.metrics import OnStep, RunLog, RunSummary, read_metrics, recovery, start_trackers
from gqa_convert.training.models import load_frozen, load_student, place_student, remove_output
from gqa_convert.training.opening import Opened, check_trackers, open_recipe
from gqa_convert.training.optimizers import build_optimizer
from gqa_convert.training.recipe import CHANGEABLE, RECORDED, Recipe, make_recipe
from gqa_convert.training.run_context import RunContext
from gqa_convert.training.run_folder import OutputLock, RunFolder
from gqa_convert.training.run_text import RunText, open_text
from gqa_convert.training.sharding import number_of_shards
from gqa_convert.training.stopping import StopRequests
from gqa_convert.training.trainer import Trainer, train


def start_run(
    recipe: Recipe,
    stops: StopRequests,
    on_message: Callable[[str], None],
    on_step: OnStep,
    on_tokenize: OnTokenize,
    command: list[str] | None,
) -> RunSummary | None:
    """Join the processes of a run, and train in its output folder while no other run does; see `uptrain_checkpoint`."""
    check_trackers(recipe)
    folder = RunFolder(Path(recipe.output))
    options: dict[str, Any] = {}
    if recipe.trackers:
        options = {"log_with": list(recipe.trackers), "project_dir": str(folder.trackers)}
    accelerator = join(**options)
    sharded = number_of_shards(recipe.sharding, accelerator.num_processes) > 1
    say = on_message if accelerator.is_main_process else lambda _: None
    context = RunContext(recipe, folder, accelerator, sharded, say)
    lock: OutputLock | None = None
    try:
        with context.together():
            check_lora(recipe.lora, sharded=sharded)
            folder.refuse_foreign()
            if context.main:
                lock = OutputLock(folder.path)
        return _run(context, stops, on_step, on_tokenize, command)
    finally:
        if lock is not None:
            lock.release()


def _run(
    context: RunContext,
    stops: StopRequests,
    on_step: OnStep,
    on_tokenize: OnTokenize,
    command: list[str] | None,
) -> RunSummary | None:
    """Train from the state of the output folder to the trained model; returns the summary on the main process."""
    recipe, folder, accelerator = context.recipe, context.folder, context.accelerator
    checkpoints = Checkpoints(folder.checkpoints, recipe.keep_checkpoints, main=context.main, together=context.together)
    with context.together():
        if context.main:  # what a killed run left behind
            sweep(folder.path)
            checkpoints.sweep()
    with context.together():
        finished, record = _find_resume_point(context, checkpoints)
    if finished is not None:
        context.say(f"{recipe.output} is already complete: raise the budget to continue it, or name another output")
        return finished if context.main else None
    with context.together():
        check_destination(folder.model, None, overwrite=True)
    progress = Progress(run_id=secrets.token_hex(8))
    if record is not None:
        context.say(f"resuming from {checkpoints.path(record.progress.step)}")
        progress = _resume_progress(record, context)

    opened = _open_models(context)
    text = open_text(context, opened, record.dataset_commits if record else folder.read_commits(), on_tokenize)
    if record is not None and record.samples != text.samples.fingerprint:
        raise ResumeError(
            f"the training text or the tokenizer has changed since {checkpoints.path(progress.step)} was saved: restore it, or name another output"
        )
    steps = recipe.steps(text.samples.tokens_per_sample)
    recipe.warmup(steps)  # raises an error if the warm-up is longer than the run

    torch.manual_seed(recipe.seed)
    with context.together():
        model = load_student(recipe, opened.student_folder, sharded=context.sharded)
    student = place_student(model, accelerator, sharded=context.sharded, bf16=recipe.precision == "bf16")
    optimizer, teacher = build_optimizer(model, recipe), None
    if opened.teacher_folder is not None:
        teacher = load_frozen(context, str(recipe.teacher), opened.teacher_folder)
    # the losses of student and teacher are computed of logits, or of the states before them
    sample = text.samples.batch([0])
    if remove_output(context, recipe.model, model, sample) and teacher is not None:
        remove_output(context, str(recipe.teacher), teacher, sample)
    trainer = Trainer(
        recipe, student, optimizer, text.samples, accelerator, steps=steps, teacher=teacher, progress=progress
    )
    with context.together():
        if context.main:  # the first files, after which the folder belongs to the run
            folder.begin(recipe, text.dataset_commits)
    _evaluate_start_and_source(context, opened, trainer, text)
    if record is not None:
        with stops.at_boundaries():
            state = state_of(student, optimizer, trained_only=recipe.lora is not None)
            checkpoints.load(progress.step, state, accelerator.num_processes)
            set_state(student, optimizer, state, trained_only=recipe.lora is not None)
    with context.together():
        log = RunLog(folder.metrics, progress.step, steps, accelerator, on_step)
    start_trackers(accelerator, recipe, progress.run_id, folder.trackers)

    began, first_step, first_token = time.monotonic(), progress.step, progress.tokens
    try:
        train(context, trainer, text, checkpoints, log, stops)
    finally:
        log.close()
    if text.held_out and "last" not in progress.evaluations:  # no step was left to take, and the text is new
        progress.evaluations["last"] = trainer.evaluate(student, text.held_out)
    seconds = time.monotonic() - began
    pace = {
        "steps_since_resumption": steps - first_step,
        "seconds_since_resumption": round(seconds, 1),
        "tokens_per_second": round((progress.tokens - first_token) / max(seconds, 1e-3)),
    }
    return _finish(context, trainer, opened, checkpoints, pace, text, command)


# Before training: read the output folder and open what the recipe names


def _find_resume_point(context: RunContext, checkpoints: Checkpoints) -> tuple[RunSummary | None, RunRecord | None]:
    """The summary of a complete run, or the record of the checkpoint to resume from.

    Raises:
        ResumeError: the output folder holds a run that this recipe can't resume.
    """
    recipe, folder = context.recipe, context.folder
    finished, newest = folder.finished(), checkpoints.newest(context.say)
    if finished is None and newest is None:
        return None, None
    earlier = make_recipe(newest.recipe) if newest else folder.read_recipe()
    commits = newest.dataset_commits if newest else folder.read_commits()
    different = earlier.pinned(commits).differences(recipe.pinned(commits), free=CHANGEABLE)
    if different:
        raise ResumeError(
            f"{recipe.output} holds a run with another recipe: {'; '.join(different)}; restore these keys to resume it, or name another output"
        )
    if finished is not None and earlier.budget_tokens == recipe.budget_tokens:
        return finished, None
    if newest is None:
        raise ResumeError(
            f"{recipe.output} holds a complete run without checkpoints, which can't be resumed: name another output"
        )
    return None, newest


def _resume_progress(record: RunRecord, context: RunContext) -> Progress:
    """The progress that a run resumes with. Differences from the run that saved the checkpoint are reported."""
    progress, processes = copy.deepcopy(record.progress), context.accelerator.num_processes
    if record.processes != processes:
        context.say(
            f"the checkpoint was saved by {record.processes} process(es): sums are rounded differently from now on"
        )
    before = make_recipe(record.recipe).pinned(record.dataset_commits)
    now = context.recipe.pinned(record.dataset_commits)
    for change in before.differences(now, free=CHANGEABLE - RECORDED, may_grow=False):
        progress.changes.append(f"from step {progress.step + 1}: {change}")
        context.say(change)
    progress.skipped_in_a_row = 0
    return progress


def _open_models(context: RunContext) -> Opened:

    model = context.recipe.model
    with context.together():
        opened = open_recipe(context.recipe)
        converted = earlier_record(opened.student)
    if converted is None:
        context.say(f"{model} has no {PROVENANCE}: it was not converted by gqa-convert and is trained unchanged")
    for note in opened.student.notes:
        context.say(f"{model}: {note}")
    return opened


def _evaluate_start_and_source(context: RunContext, opened: Opened, trainer: Trainer, text: RunText) -> None:
    """Measure the losses at the start and of the source, relative to which recovery is stated, unless they are
    recorded.
    """

    progress, source = trainer.progress, trainer.teacher
    if not text.held_out or progress.evaluated_on == text.held_out.fingerprint:
        return
    start = trainer.evaluate(trainer.model, text.held_out)
    progress.evaluations = {"start": start}
    context.say(f"language-model loss at the start: {start:.4f} nats per token of the evaluation data")
    if source is None and opened.source_folder is not None:
        name = str(opened.source_folder)
        source = load_frozen(context, name, opened.source_folder)
        remove_output(context, name, source, text.held_out.batch([0]))
    if source is not None:
        progress.evaluations["source"] = trainer.evaluate(source, text.held_out)
        context.say(f"language-model loss of the source: {progress.evaluations['source']:.4f} nats per token")
    progress.evaluated_on = text.held_out.fingerprint


# After training


def _finish(
    context: RunContext,
    trainer: Trainer,
    opened: Opened,
    checkpoints: Checkpoints,
    pace: dict[str, Any],
    text: RunText,
    command: list[str] | None,
) -> RunSummary | None:
    """Write the trained model and, last, the summary; returns the summary on the main process."""

    recipe, folder, progress, summary = context.recipe, context.folder, trainer.progress, None
    model = trainer.unwrapped
    state = {}
    if recipe.lora is None:
        state = whole_model(trainer.model)
    else:
        gather_adapters(model)
    with context.together():
        if context.main:
            if recipe.lora is not None:
                model, state = merged_model(model, opened.student_folder)
            lines = read_metrics(folder.metrics)
            summary = RunSummary(
                **measurement("uptrain", command, str(context.accelerator.device)).as_json(),
                processes=context.accelerator.num_processes,
                model=str(folder.model),
                steps=progress.step,
                tokens=progress.tokens,
                alpha=progress.tokens / recipe.pretraining_tokens if recipe.pretraining_tokens else None,
                skipped_steps=progress.skipped,
                changes=progress.changes,
                final_loss=lines[-1].get("loss") if lines else None,
                evaluation=recovery(progress.evaluations) if text.held_out else None,
                **pace,
                adapters=None if recipe.lora is None else str(recipe.lora),
            )
            export_model(model, state, opened.student, folder.model, summary.provenance(text.pinned))
            checkpoints.prune()  # a run may have been killed between its last checkpoint and this point
            write_json(folder.summary, summary.as_json())
    if recipe.trackers:
        context.accelerator.end_training()
    return summary
