"""A run: sets it up from its recipe and the state of its output folder, trains, and publishes the
model.
"""

from collections.abc import Callable
from contextlib import ExitStack
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_optimizer_state_dict,
)

from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.data.token_files import OnTokenize
from gqa_convert.errors import DivergedError, ResumeError, StoppedError
from gqa_convert.families.loading import read_object
from gqa_convert.processes import Say, by_first, check_agreement, join, rank, started, together
from gqa_convert.publishing.atomic_files import sync, write_json
from gqa_convert.publishing.publication import check_destination
from gqa_convert.runtime.machine import machine, measurement
from gqa_convert.sharding import number_of_shards, unwrapped

from .checkpoints import Progress, state_of
from .export import export_model, merged_model
from .metrics import RunSummary, StepMetrics, check_trackers, log_step, read_metrics, recovery
from .models import (
    check_apart,
    check_lora,
    load_student,
    load_teacher,
    place,
    set_execution,
    share_weights,
)
from .notes import notes
from .opening import Opened, open_recipe
from .optimizers import build_optimizer, share_of_peak
from .recipe import Recipe, make_recipe
from .run_folder import RunFolder
from .stopping import StopRequests
from .trainer import Trainer, remove_output
from .uptrain import Caller

Export = Callable[[Path], RunSummary | None]
"""Writes the model as it is now to a folder; see `export`."""

_LONGEST_STREAK = 5
"""The number of consecutive steps without a finite gradient after which the run ends."""


def uptrain(recipe: Recipe, stops: StopRequests, caller: Caller) -> RunSummary | None:
    """Train in the output folder of a recipe while no other run does. Every process calls this; see
    `uptrain_checkpoint`.
    """
    folder = RunFolder(recipe)
    accelerator = join(log_with=[*recipe.trackers], project_dir=str(folder.path / "trackers"))
    device = accelerator.device
    say = _ignore if rank() else caller.on_message
    with ExitStack() as stack:
        # refuse what can't work
        with together():
            check_trackers(accelerator, recipe)
            shards = number_of_shards(recipe.sharding, started())
            check_lora(recipe.lora, sharded=shards > 1)
            folder.refuse_foreign()
            if not rank():
                stack.enter_context(folder.locked())
        versions = {**machine().versions, "python": None}
        check_agreement({**recipe.resolved(), **versions, "the number of shards": shards})

        # the first process decides where to resume: others may see the folder as it was before
        finished, progress = by_first(partial(find_resume_point, recipe, folder, say))
        with together():
            folder.checkpoints.check_seen(progress)
        if finished:
            say(
                f"{recipe.output} is already complete: raise the budget to continue it, or name "
                "another output"
            )
            return None if rank() else finished
        with together():
            check_destination(folder.model, None, overwrite=True)

        opened = open_inputs(recipe, progress, folder, caller.on_tokenize, say)
        for note in notes(recipe, opened.samples, started(), device):
            say(f"note: {note}")
        trainer = load_trainer(recipe, opened, progress, device, shards, say)
        by_first(lambda: folder.begin(recipe, opened.dataset_commits, progress.step))
        # the losses relative to which recovery is stated
        if trainer.held_out and not progress.evaluations:
            for name, model in (("start", trainer.model), ("source", trainer.teacher)):
                if model:
                    loss = progress.evaluations[name] = trainer.evaluate(model)
                    say(
                        f"language-model loss on the evaluation data, {name}: {loss:.4f} nats "
                        "per token"
                    )
        export_to = partial(
            export, trainer, opened.models[0], folder.metrics, str(device), caller.command
        )
        log = partial(log_step, folder.metrics, accelerator, caller.on_step, trainer.steps)
        with stops.at_boundaries():
            if progress.step:
                state = state_of(trainer.model, trainer.optimizer)
                folder.checkpoints.load(progress.step, state)
                set_optimizer_state_dict(trainer.model, trainer.optimizer, state["optimizer"])
            settings = {name: str(value) for name, value in recipe.resolved().items()}
            same_run = {"wandb": {"id": progress.tracked_as, "resume": "allow"}}
            accelerator.init_trackers("gqa-convert", settings, init_kwargs=same_run)
            train(trainer, folder, log, export_to, stops, say)
        summary = export_to(folder.model)
        if summary:
            # a run may have been killed between its last checkpoint and this point
            folder.checkpoints.prune()
            write_json(folder.summary, summary.as_json())
        if recipe.trackers:
            accelerator.end_training()
    return summary


def _ignore(message: str) -> None:
    """What other processes than the main one do with messages."""


def find_resume_point(
    recipe: Recipe, folder: RunFolder, say: Say
) -> tuple[RunSummary | None, Progress]:
    """The summary of a complete run, and the progress of the newest checkpoint.

    Raises:
        ResumeError: the output folder holds a run that this recipe can't resume.
    """
    finished = folder.finished()
    newest = folder.checkpoints.newest(say)
    known = finished or newest
    if known is None:
        return None, Progress()
    earlier = make_recipe(known.recipe)
    pinned = recipe.pinned(read_object(folder.dataset_commits))
    different = earlier.differences(pinned, "never")
    if recipe.budget_tokens < earlier.budget_tokens:
        different.append(
            f"the budget was {earlier.budget_tokens} tokens and is now {recipe.budget_tokens}"
        )
    if different:
        raise ResumeError(
            f"{recipe.output} holds a run with another recipe: {'; '.join(different)}; restore "
            "these keys to resume it, or name another output"
        )
    if finished and earlier.budget_tokens == recipe.budget_tokens:
        return finished, Progress()
    if newest is None:
        raise ResumeError(
            f"{recipe.output} holds a complete run without checkpoints, which can't be resumed: "
            "name another output"
        )
    return None, newest


def open_inputs(
    recipe: Recipe, progress: Progress, folder: RunFolder, on_tokenize: OnTokenize, say: Say
) -> Opened:
    """Open the models and the texts that a recipe names, compare them with those of the checkpoint
    from which the run resumes, and note in its progress what has changed.

    Raises:
        ResumeError: a text or a model is another one, or the learning rate has fallen to 0.
        RecipeError: the warm-up is longer than the run.
    """
    checkpoint = folder.checkpoints.path(progress.step)
    earlier = None
    if progress.step:
        earlier = make_recipe(progress.recipe)
        progress.skipped_in_a_row = 0
        say(f"resuming from {checkpoint}")
        for change in earlier.differences(recipe, "recorded", "budget"):
            progress.changes.append(f"from step {progress.step + 1}: {change}")
            say(change)
    opened = open_recipe(recipe, read_object(folder.dataset_commits), on_tokenize, say)
    with together():
        for name, known in progress.inputs.items():
            if opened.inputs.get(name, known) != known:
                raise ResumeError(
                    f"{name} has changed since {checkpoint} was saved: restore it, or name "
                    "another output"
                )
        fix_schedule(recipe, earlier, progress, opened.samples.tokens_per_sample)
    progress.recipe = opened.recipe.resolved()
    progress.inputs = opened.inputs
    return opened


def fix_schedule(
    recipe: Recipe, earlier: Recipe | None, progress: Progress, tokens: int | Fraction
) -> None:
    """Fix the warm-up and the highest learning rate of what is still to come.

    A larger budget than that of an earlier recipe leaves the warm-up as long as it was, and after
    it the learning rate never rises.

    Args:
        recipe, earlier: the recipes of the run from now on, and so far if it resumes.
        progress: is changed.
        tokens: of a sample.

    Raises:
        ResumeError: the learning rate has fallen to 0.
        RecipeError: the warm-up is longer than the run.
    """
    steps = recipe.steps(tokens)
    if earlier is None:
        progress.warmup_steps = recipe.warmup(steps)
        return
    warmup = progress.warmup_steps
    planned = earlier.steps(tokens)
    if planned < steps:
        reached = share_of_peak(earlier, max(progress.step, warmup), planned, warmup)
        progress.highest_share = min(progress.highest_share, reached)
    if not progress.highest_share:
        raise ResumeError(
            f"the learning rate of {recipe.output} has fallen to 0, so that more tokens would "
            "change nothing: name another output, and its model/ as model; or remove the newest "
            "checkpoints"
        )


def load_trainer(
    recipe: Recipe, opened: Opened, progress: Progress, device: Any, shards: int, say: Say
) -> Trainer:
    """Load the models, and place them on the devices."""
    samples = opened.samples
    torch.manual_seed(recipe.seed)
    source, *teachers = [each.local_folder for each in opened.models]
    with together():
        model = load_student(recipe, source, sharded=shards > 1)
        set_execution(model, recipe, device.type)
    student = place(model, device, shards=shards, bf16=recipe.precision == "bf16")
    teacher = None
    for folder in teachers:
        with together():
            teacher = load_teacher(folder, device.type, sharded=shards > 1)
            set_execution(teacher, recipe, device.type)
        if recipe.lora and shards == 1:
            share = share_weights(teacher, model)
            say(f"{share:.0%} of the teacher's weights are the model's own, in memory once")
        teacher = place(teacher, device, shards=shards, bf16=False)
    if recipe.document_masks:
        with together():
            check_apart(model)
    # the losses of student and teacher are computed of logits, or of the states before them
    first = samples.batch([0])
    if remove_output(model, first) and teacher:
        remove_output(teacher, first)
    optimizer = build_optimizer(model, recipe)
    return Trainer(recipe, student, optimizer, samples, progress, teacher, opened.held_out)


def train(
    trainer: Trainer,
    folder: RunFolder,
    log: Callable[[StepMetrics], None],
    export_to: Export,
    stops: StopRequests,
    say: Say,
) -> None:
    """Take the remaining steps; log, evaluate, save and export between them.

    Raises:
        StoppedError: a signal asked to stop, and the state is saved.
        DivergedError: too many consecutive steps had no finite gradient.
    """
    recipe = trainer.recipe
    progress = trainer.progress
    checkpoints = folder.checkpoints
    steps = trainer.steps
    saved = progress.step

    def save() -> None:
        if not rank():
            sync(folder.metrics)
        checkpoints.save(state_of(trainer.model, trainer.optimizer), progress)

    say(
        f"{steps:,} steps of {round(trainer.tokens_per_step):,} tokens on {started()} "
        f"process(es), from step {saved + 1:,}"
    )
    for metrics in trainer.run(lambda: bool(stops.names)):
        step = metrics.step
        due = step == steps or step % (recipe.evaluate_every or steps) == 0
        if due and trainer.held_out:
            loss = trainer.evaluate(trainer.model)
            metrics.evaluation_loss = progress.evaluations["last"] = loss
        if due or metrics.skipped or step % recipe.log_every == 0:
            log(metrics)
        if metrics.skipped:
            say(f"step {step}: the loss or a gradient is not finite; no update")
        if progress.skipped_in_a_row >= _LONGEST_STREAK:
            raise DivergedError(
                f"{_LONGEST_STREAK} consecutive steps up to step {step} had a loss or a gradient "
                "that is not finite: run again from the last checkpoint with a lower "
                "learning_rate, a lower gradient_clipping or precision=no"
            )
        # before the step is saved, so that a kill can't lose an export; the last one is the result
        if recipe.export_every and step % recipe.export_every == 0 and step < steps:
            out = folder.path / f"model-{step:06}"
            export_to(out)
            say(f"the model after step {step} is in {out}")
        if step % recipe.save_every == 0:
            save()
            saved = step
    if saved != progress.step:
        save()
    if progress.step < steps:
        done = "before the first step"
        if progress.step:
            done = f"after step {progress.step} of {steps}, which is saved"
        with together():  # the reason of the first process that has one
            if names := stops.names:
                raise StoppedError(
                    f"stopped by {names[0]} {done}: run the same command again to resume"
                )


def export(
    trainer: Trainer,
    source: Checkpoint,
    metrics: Path,
    device: str,
    command: list[str] | None,
    out: Path,
) -> RunSummary | None:
    """Write the model as it is now to a folder, whole or not at all. Every process calls this.

    Args:
        trainer: has the model and its progress.
        source: the checkpoint that training began with.
        metrics: the file of the run's metrics.
        device, command: of the run, for the record.
        out: the folder.

    Returns:
        On the main process, the summary of the run so far.
    """
    recipe = trainer.recipe
    progress = trainer.progress
    model = unwrapped(trainer.model)
    summary = state = None
    if recipe.lora:
        model = merged_model(model, source.local_folder)
    else:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(trainer.model, options=options)
    with together():
        if not rank():
            lines = read_metrics(metrics)
            summary = RunSummary(
                **measurement("uptrain", command, device),
                processes=started(),
                model=str(out),
                steps=progress.step,
                tokens=progress.tokens,
                alpha=recipe.pretraining_tokens and progress.tokens / recipe.pretraining_tokens,
                skipped_steps=progress.skipped,
                changes=progress.changes,
                recipe=progress.recipe,
                final_loss=lines[-1].get("loss") if lines else None,
                evaluation=recovery(progress.evaluations),
                adapters=str(recipe.lora) if recipe.lora else None,
            )
            export_model(model, state, source, out, summary.as_json())
    return summary
