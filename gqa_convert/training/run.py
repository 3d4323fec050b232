"""A run: sets it up from its recipe and the state of its output folder, trains, and publishes the model."""

import copy
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from gqa_convert.checkpoint.atomic_files import write_json
from gqa_convert.checkpoint.machine import measurement
from gqa_convert.checkpoint.provenance import PROVENANCE, earlier_record
from gqa_convert.checkpoint.publication import check_destination, sweep
from gqa_convert.data.samples import TokenCache
from gqa_convert.data.token_files import OnTokenize
from gqa_convert.errors import DivergedError, ResumeError, StoppedError
from gqa_convert.training.checkpoints import Checkpoints, Progress, RunRecord, set_state, state_of, whole_model
from gqa_convert.training.distributed import join, together, wait
from gqa_convert.training.export import export_model
from gqa_convert.training.lora import check_lora, gather_adapters, merged_model
from gqa_convert.training.metrics import OnStep, RunLog, RunSummary, read_metrics, recovery, start_trackers
from gqa_convert.training.models import load_frozen, load_student, place_student, remove_output
from gqa_convert.training.opening import Opened, check_trackers, open_recipe
from gqa_convert.training.optimizers import build_optimizer
from gqa_convert.training.recipe import CHANGEABLE, RECORDED, Recipe, make_recipe
from gqa_convert.training.run_folder import RunFolder
from gqa_convert.training.run_text import RunText, open_text
from gqa_convert.training.sharding import number_of_shards, unwrapped
from gqa_convert.training.stopping import StopRequests
from gqa_convert.training.trainer import Trainer

_LONGEST_STREAK = 5
"""The number of consecutive steps without a finite gradient after which the run ends."""


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
    accelerator = join(log_with=list(recipe.trackers), project_dir=str(folder.trackers))
    run = Run(recipe, folder, accelerator, on_message if accelerator.is_main_process else lambda _: None)
    with ExitStack() as stack:
        with together():
            check_lora(recipe.lora, sharded=run.sharded)
            folder.refuse_foreign()
            if run.main:
                stack.enter_context(folder.locked())
                sweep(folder.path)  # what a killed run left behind
                run.checkpoints.sweep()
        with together():
            finished, record = run.find_resume_point()
        if finished is not None:
            run.say(f"{recipe.output} is already complete: raise the budget to continue it, or name another output")
            return finished if run.main else None
        run.open(record, on_tokenize)
        run.load()
        run.begin(record, stops)
        run.train(stops, on_step)
        return run.finish(command)


class Run:
    """A run on this process. Its methods are called in their order, on every process.

    Attributes:
        recipe: the recipe of the run.
        folder: the output folder.
        accelerator: accelerate's Accelerator of this process.
        main: whether this is the main process.
        sharded: whether the models are sharded over the processes.
        say: called with messages about events between the steps; does nothing except on the main process.
        checkpoints: of the run.
        opened: the models' facts, once they are known.
        text: its texts, once they are open.
        trainer: what takes the steps, once models are loaded.
        progress: how far it is.
    """

    opened: Opened
    text: RunText
    trainer: Trainer

    def __init__(self, recipe: Recipe, folder: RunFolder, accelerator: Any, say: Callable[[str], None]) -> None:
        self.recipe, self.folder, self.accelerator, self.say = recipe, folder, accelerator, say
        self.main = bool(accelerator.is_main_process)
        self.sharded = number_of_shards(recipe.sharding, accelerator.num_processes) > 1
        self.checkpoints = Checkpoints(folder.checkpoints, recipe.keep_checkpoints, main=self.main)
        self.progress = Progress(run_id=secrets.token_hex(8))

    def find_resume_point(self) -> tuple[RunSummary | None, RunRecord | None]:
        """The summary of a complete run, or the record of the checkpoint to resume from.

        Raises:
            ResumeError: the output folder holds a run that this recipe can't resume.
        """
        recipe = self.recipe
        finished, newest = self.folder.finished(), self.checkpoints.newest(self.say)
        known = finished or newest
        if known is None:
            return None, None
        commits, earlier = self.folder.read_commits(), make_recipe(known.recipe)
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

    def open(self, record: RunRecord | None, on_tokenize: OnTokenize) -> None:
        """Open the models and the texts that the recipe names, and take up the progress of a checkpoint.

        Args:
            record: of the checkpoint to resume from, if there is one.
            on_tokenize: called with a source of text, what is tokenised and the total.

        Raises:
            ResumeError: the text is not that of the checkpoint.
        """
        recipe = self.recipe
        with together():
            check_destination(self.folder.model, None, overwrite=True)
        commits = self.folder.read_commits()
        if record is not None:
            self.say(f"resuming from {self.checkpoints.path(record.progress.step)}")
            self._resume_progress(record)
        with together():
            self.opened = open_recipe(recipe)
            converted = earlier_record(self.opened.student)
        if converted is None:
            self.say(
                f"{recipe.model} has no {PROVENANCE}: it was not converted by gqa-convert and is trained unchanged"
            )
        for note in self.opened.student.notes:
            self.say(f"{recipe.model}: {note}")
        cache = TokenCache(is_local_main=self.accelerator.is_local_main_process, wait=wait, progress=on_tokenize)
        self.text = open_text(recipe, self.opened, cache, commits, str(self.accelerator.device))
        for note in self.text.samples.notes:
            self.say(note)
        if record is not None and record.samples != self.text.samples.fingerprint:
            raise ResumeError(
                f"the training text or the tokenizer has changed since {self.checkpoints.path(self.progress.step)} was saved: restore it, or name another output"
            )

    def _resume_progress(self, record: RunRecord) -> None:
        """Take up the progress of a checkpoint. Differences from the run that saved it are reported."""
        self.progress = progress = copy.deepcopy(record.progress)
        if record.processes != self.accelerator.num_processes:
            self.say(
                f"the checkpoint was saved by {record.processes} process(es): sums are rounded differently from now on"
            )
        earlier = make_recipe(record.recipe)
        for change in earlier.differences(self.recipe, free=CHANGEABLE - RECORDED, may_grow=False):
            progress.changes.append(f"from step {progress.step + 1}: {change}")
            self.say(change)
        progress.skipped_in_a_row = 0

    def load(self) -> None:
        """Load the models, and place them on the devices."""
        recipe, opened, text = self.recipe, self.opened, self.text
        steps = recipe.steps(text.samples.tokens_per_sample)
        recipe.warmup(steps)  # raises an error if the warm-up is longer than the run
        torch.manual_seed(recipe.seed)
        with together():
            model = load_student(recipe, opened.student_folder, sharded=self.sharded)
        student = place_student(model, self.accelerator, sharded=self.sharded, bf16=recipe.precision == "bf16")
        optimizer, teacher = build_optimizer(model, recipe), None
        if opened.teacher_folder is not None:
            teacher = self._load_frozen(opened.teacher_folder)
        # the losses of student and teacher are computed of logits, or of the states before them
        if self._remove_output(recipe.model, model) and teacher is not None:
            self._remove_output(str(recipe.teacher), teacher)
        self.trainer = Trainer(
            recipe,
            student,
            optimizer,
            text.samples,
            self.accelerator,
            steps=steps,
            teacher=teacher,
            progress=self.progress,
        )

    def _load_frozen(self, folder: Path) -> Any:
        return load_frozen(folder, self.accelerator.device, sharded=self.sharded)

    def _remove_output(self, name: str, model: Any) -> bool:
        removed = remove_output(model, self.text.samples.batch([0]))
        if not removed:
            self.say(f"{name} makes the logits of a batch at once: expect more memory than was estimated")
        return removed

    def begin(self, record: RunRecord | None, stops: StopRequests) -> None:
        """Write the first files of the run, evaluate what was not evaluated yet, and restore a checkpoint.

        Args:
            record: of the checkpoint to resume from, if there is one.
            stops: signals wait until the checkpoint is restored.
        """
        with together():
            if self.main:
                self.folder.begin(self.recipe, self.text.dataset_commits)
        self._evaluate_start_and_source()
        if record is not None:
            with stops.at_boundaries():
                trainer = self.trainer
                state = state_of(trainer.model, trainer.optimizer)
                self.checkpoints.load(self.progress.step, state, self.accelerator.num_processes)
                set_state(trainer.model, trainer.optimizer, state)

    def _evaluate_start_and_source(self) -> None:
        """Measure the losses at the start and of the source, relative to which recovery is stated, unless they are
        recorded.
        """
        trainer, progress, held_out = self.trainer, self.progress, self.text.held_out
        if not held_out or progress.evaluated_on == held_out.fingerprint:
            return
        start = trainer.evaluate(trainer.model, held_out)
        progress.evaluations = {"start": start}
        self.say(f"language-model loss at the start: {start:.4f} nats per token of the evaluation data")
        source, folder = trainer.teacher, self.opened.source_folder
        if source is None and folder is not None:
            source = self._load_frozen(folder)
            self._remove_output(str(folder), source)
        if source is not None:
            progress.evaluations["source"] = trainer.evaluate(source, held_out)
            self.say(f"language-model loss of the source: {progress.evaluations['source']:.4f} nats per token")
        progress.evaluated_on = held_out.fingerprint

    def train(self, stops: StopRequests, on_step: OnStep) -> None:
        """Take the remaining steps; log, evaluate and save between them.

        Raises:
            StoppedError: a signal asked to stop, and the state is saved.
            DivergedError: too many consecutive steps had no finite gradient.
            Exception: the text for the next step can't be read.
        """
        recipe, trainer, progress, held_out = self.recipe, self.trainer, self.progress, self.text.held_out
        steps = trainer.steps
        with together():
            log = RunLog(self.folder.metrics, progress.step, steps, self.accelerator, on_step)
        start_trackers(self.accelerator, recipe, progress.run_id, self.folder.trackers)
        saved = progress.step
        self.say(
            f"{steps:,} steps of {round(trainer.tokens_per_step):,} tokens on {self.accelerator.num_processes} process(es), from step {saved + 1:,}"
        )
        with stops.at_boundaries():
            for metrics in trainer.run(lambda: bool(stops)):
                step = metrics.step
                last = step == steps
                due = last or (recipe.evaluate_every is not None and step % recipe.evaluate_every == 0)
                if due and held_out:
                    metrics.evaluation_loss = trainer.evaluate(trainer.model, held_out)
                    progress.evaluations["last"] = metrics.evaluation_loss
                if due or metrics.skipped or step % recipe.log_every == 0:
                    log.write(metrics)
                if metrics.skipped:
                    self.say(f"step {step}: the loss or a gradient is not finite; no update")
                if progress.skipped_in_a_row >= _LONGEST_STREAK:
                    raise self._diverged()
                if last or step % recipe.save_every == 0:
                    self._save(log)
                    saved = step
            if saved != progress.step:
                self._save(log)
            if progress.step < steps:
                self._stop(stops)
        if held_out and "last" not in progress.evaluations:  # no step was left to take, and the text is new
            progress.evaluations["last"] = trainer.evaluate(trainer.model, held_out)

    def _save(self, log: RunLog) -> None:
        log.sync()
        record = RunRecord(
            progress=self.progress,
            recipe=self.text.recipe.resolved(),
            processes=self.accelerator.num_processes,
            samples=self.text.samples.fingerprint,
        )
        self.checkpoints.save(state_of(self.trainer.model, self.trainer.optimizer), record)

    def _diverged(self) -> DivergedError:
        whole, progress = self.checkpoints.whole(), self.progress
        where = "there is no checkpoint yet"
        if whole:
            where = f"{self.checkpoints.path(whole[0].progress.step)} is intact"
        return DivergedError(
            f"{progress.skipped_in_a_row} consecutive steps up to step {progress.step} had a loss or a gradient that is not finite; {where}: run "
            "again with a lower learning_rate, a lower gradient_clipping or precision=no"
        )

    def _stop(self, stops: StopRequests) -> None:
        """End an incomplete run on all processes, with the reason of the first process that has one."""
        step, problem = self.progress.step, self.trainer.problem
        done = f"after step {step} of {self.trainer.steps}, which is saved" if step else "before the first step"
        with together():
            if problem is not None:
                self.say(f"the text of the next step can't be read; the run ends {done}")
                raise problem
            if stops:
                raise StoppedError(f"stopped by {stops.names[0]} {done}: run the same command again to resume")
        raise StoppedError(f"stopped {done}: run the same command again to resume")

    def finish(self, command: list[str] | None) -> RunSummary | None:
        """Write the trained model and, last, the summary; returns the summary on the main process.

        Args:
            command: the command line, for the records.
        """
        recipe, folder, summary = self.recipe, self.folder, None
        model = unwrapped(self.trainer.model)
        state = {}
        if recipe.lora is None:
            state = whole_model(self.trainer.model)
        else:
            gather_adapters(model)
        with together():
            if self.main:
                if recipe.lora is not None:
                    model, state = merged_model(model, self.opened.student_folder)
                summary = self._summary(command)
                export_model(model, state, self.opened.student, folder.model, summary.provenance())
                self.checkpoints.prune()  # a run may have been killed between its last checkpoint and this point
                write_json(folder.summary, summary.as_json())
        if recipe.trackers:
            self.accelerator.end_training()
        return summary

    def _summary(self, command: list[str] | None) -> RunSummary:
        recipe, progress, lines = self.recipe, self.progress, read_metrics(self.folder.metrics)
        return RunSummary(
            **measurement("uptrain", command, str(self.accelerator.device)),
            processes=self.accelerator.num_processes,
            model=str(self.folder.model),
            steps=progress.step,
            tokens=progress.tokens,
            alpha=progress.tokens / recipe.pretraining_tokens if recipe.pretraining_tokens else None,
            skipped_steps=progress.skipped,
            changes=progress.changes,
            recipe=self.text.recipe.resolved(),
            final_loss=lines[-1].get("loss") if lines else None,
            evaluation=recovery(progress.evaluations) if self.text.held_out else None,
            adapters=None if recipe.lora is None else str(recipe.lora),
        )
