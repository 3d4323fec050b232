"""One uptraining run on this process: `Run.go` continues from the state of the output folder to the trained model."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gqa_convert.checkpoint.atomic_files import write_json, write_whole
from gqa_convert.checkpoint.files import links_note
from gqa_convert.checkpoint.machine import available_memory, measurement
from gqa_convert.checkpoint.provenance import PROVENANCE, earlier_record
from gqa_convert.checkpoint.publication import check_destination, sweep
from gqa_convert.errors import InterruptedRunError, ResumeError
from gqa_convert.text.dataset_commits import DatasetCommits
from gqa_convert.text.objectives import OBJECTIVES
from gqa_convert.text.samples import Samples
from gqa_convert.training import memory
from gqa_convert.training.architecture import read_architecture
from gqa_convert.training.checkpoints import Checkpoints, Progress, RunRecord
from gqa_convert.training.curve import draw_curve
from gqa_convert.training.distributed import gathered, local_processes, saving_group, waiting_group
from gqa_convert.training.export import export_model
from gqa_convert.training.loop import Trainer
from gqa_convert.training.lora import gather_adapters, merged_model
from gqa_convert.training.metrics import MetricsLine, read_metrics
from gqa_convert.training.opening import Opened, check_trackers, open_recipe
from gqa_convert.training.output_lock import OutputLock
from gqa_convert.training.recipe import Recipe
from gqa_convert.training.resuming import look_back, take_up
from gqa_convert.training.run_context import join_run
from gqa_convert.training.run_folder import RunFolder
from gqa_convert.training.run_log import OnStep, RunLog
from gqa_convert.training.run_models import RunModels
from gqa_convert.training.run_steps import RunSteps
from gqa_convert.training.run_text import HeldOut, RunText, open_text
from gqa_convert.training.saving import Saver
from gqa_convert.training.state import StateDict, whole_model
from gqa_convert.training.stopping import StopRequests
from gqa_convert.training.summary import Pace, RunSummary, summarise
from gqa_convert.training.trackers import start_trackers


class Run:
    """One run, on this process.

    Args:
        recipe: the recipe of the run.
        stops: signals that ask the run to stop.
        on_message: called with messages about events between the steps.
        on_step: called on the main process after every step that is logged.
        on_tokenize: called with a source of text, the bytes tokenised and their total.
        command: the command line, for the records.
    """

    def __init__(
        self,
        recipe: Recipe,
        stops: StopRequests,
        on_message: Callable[[str], None],
        on_step: OnStep,
        on_tokenize: Any,
        command: list[str] | None,
    ) -> None:
        check_trackers(recipe)
        self.recipe, self.stops = recipe, stops
        self.folder = RunFolder(Path(recipe.output))
        self.context = join_run(recipe, self.folder, on_message)
        self.accelerator, self.main = self.context.accelerator, self.context.main
        self.together, self.say = self.context.together, self.context.say
        self.on_step, self.on_tokenize, self.command = on_step, on_tokenize, command
        self.checkpoints = self._checkpoints(waiting_group)
        saving = self._checkpoints(saving_group) if recipe.async_checkpoints else self.checkpoints
        self.saver = Saver(saving, background=recipe.async_checkpoints, on_saved=self._saved)
        self.lock: OutputLock | None = None

    def go(self) -> RunSummary | None:
        """Train from the state of the output folder to the trained model.

        Returns:
            The summary on the main process, None on the others.
        """
        try:
            return self._go()
        except InterruptedRunError:  # at once, leaving behind a checkpoint that is being written
            raise
        except Exception:
            with suppress(Exception):
                self.saver.finish()
            raise

    def _go(self) -> RunSummary | None:
        with self.together():
            self._take_output()
        finished, record = self._look_back()
        if finished is not None:
            self.say(
                f"{self.recipe.output} is already complete: raise the budget to continue it, or name another output"
            )
            return finished if self.main else None
        with self.together():
            check_destination(self.folder.model, None, overwrite=True)
        progress = self._progress(record)

        self.opened = self._open_recipe()
        for note in links_note(self.opened.student.links_out):
            self.say(f"{self.recipe.model}: {note}")
        text = self._open_text(record.dataset_commits if record else self.folder.read_commits())
        samples = text.samples
        self._check_same_samples(record, samples)
        self.pinned = text.pinned
        steps = self.recipe.steps(samples.tokens_per_sample)
        self.recipe.warmup(steps)  # raises an error if the warm-up is longer than the run
        self._say_memory(samples)

        torch.manual_seed(self.recipe.seed)
        self.models = RunModels(self.context, self.opened)
        trainer = Trainer(
            self.recipe,
            self.models.student,
            self.models.optimizer,
            samples,
            self.accelerator,
            steps=steps,
            teacher=self.models.load_teacher(samples),
            progress=progress,
        )
        run_steps = RunSteps(self.context, self.models, text, trainer, self.checkpoints, self.saver, self.stops)
        with self.together():
            self._begin_files(text.dataset_commits)
        self._evaluate_start_and_source(trainer, text.held_out)
        if record:
            with self.stops.at_boundaries():
                run_steps.restore(progress.step)
        with self.together():
            log = RunLog(self.folder.metrics, progress.step, trainer, self.on_step, main=self.main)
        start_trackers(self.accelerator, self.recipe, self.folder.tracker_runs, main=self.main)

        began, first_step, first_token = time.monotonic(), progress.step, progress.tokens
        try:
            run_steps.take(log)
        finally:
            log.close()
            samples.close()
        pace = Pace(steps - first_step, time.monotonic() - began, progress.tokens - first_token)
        return self._finish(progress, pace)

    def release(self) -> None:
        """Release the lock of the output folder."""
        if self.lock is not None:
            self.lock.release()

    def _checkpoints(self, group: Callable[[], Any]) -> Checkpoints:
        """The checkpoints of the run, written with collectives of a process group."""
        recipe = self.recipe
        return Checkpoints(
            self.folder.checkpoints,
            recipe.keep_checkpoints,
            main=self.main,
            together=partial(self.together, group),
            process=self.accelerator.process_index,
            gather=partial(gathered, self.accelerator, group=group),
            group=group,
        )

    # Before training: read the output folder and open what the recipe names

    def _take_output(self) -> None:
        """Lock the output folder for this run, and remove unfinished files of a killed run."""
        self.folder.refuse_foreign()
        if self.main:
            self.lock = OutputLock(self.folder.path)
            sweep(self.folder.path)
            self.checkpoints.sweep()

    def _look_back(self) -> tuple[RunSummary | None, RunRecord | None]:
        """The summary of a complete run, or the record of the newest checkpoint whose files are intact."""
        while True:
            with self.together():
                finished, record = look_back(self.recipe, self.folder, self.checkpoints)
            if record is None:
                return finished, None
            if self.checkpoints.is_intact(record, self.accelerator.num_processes):
                return None, record

    def _progress(self, record: RunRecord | None) -> Progress:
        """The progress to continue from; later damaged checkpoints are renamed."""
        if record is None:
            return Progress()
        step = record.progress.step
        with self.together():
            aside = self.checkpoints.set_aside_after(step) if self.main else []
        for path, problem in aside:
            self.say(f"a checkpoint is damaged ({problem}) and was renamed to {path}: resuming from the previous one")
        self.say(f"resuming from {self.checkpoints.path(step)}")
        return take_up(record, self.recipe, self.folder, self.accelerator.num_processes, self.say)

    def _open_recipe(self) -> Opened:
        with self.together():
            opened = open_recipe(self.recipe)
            converted = earlier_record(opened.student)
        if converted is None:
            self.say(
                f"{self.recipe.model} has no {PROVENANCE}: it was not converted by gqa-convert and is trained unchanged"
            )
        return opened

    def _open_text(self, known: DatasetCommits) -> RunText:
        return open_text(self.context, self.opened, known, self.on_tokenize)

    def _check_same_samples(self, record: RunRecord | None, samples: Samples) -> None:
        if record and record.samples != samples.fingerprint:
            path = self.checkpoints.path(record.progress.step)
            raise ResumeError(
                f"the training text or the tokenizer has changed since {path} was saved: restore it, or name another output"
            )

    def _say_memory(self, samples: Samples) -> None:
        """Report the estimated memory of this run, if the model's sizes are known."""
        opened = self.opened
        architecture = read_architecture(opened.student.config)
        if architecture is None or not self.main:
            return
        target = OBJECTIVES[opened.objective].target_length(opened.sequence_length)
        length, target = samples.longest or (opened.sequence_length, target)
        setting = memory.setting_of(
            self.recipe,
            **memory.parameters_of(opened.student, opened.teacher, self.recipe, self.accelerator.device.type),
            sequence_length=length,
            target_length=target,
            shards=self.context.layout.shards,
            device=self.accelerator.device.type,
        )
        free = available_memory(self.accelerator.device, local_processes())
        self.say(memory.shown(memory.plan(architecture, setting), free))

    def _begin_files(self, commits: DatasetCommits) -> None:
        """Write the first files of the run, after which the folder belongs to it."""
        if self.main:
            self.folder.write_recipe(self.recipe)
            if commits:
                write_json(self.folder.dataset_commits, commits)
            self.folder.summary.unlink(missing_ok=True)

    def _evaluate_start_and_source(self, trainer: Trainer, held_out: HeldOut) -> None:
        """Measure the losses at the start and of the source, relative to which recovery is stated, unless they are
        recorded.
        """
        progress = trainer.progress
        if not held_out.batches or progress.evaluated_on == held_out.fingerprint:
            return
        progress.evaluations = {"start": trainer.evaluate(self.models.student, held_out.batches)}
        self.say(
            f"language-model loss at the start: {progress.evaluations['start']:.4f} nats per token of the evaluation data"
        )
        source = trainer.teacher
        if source is None and self.opened.source_folder is not None:
            source = self.models.load_fixed(self.opened.source_folder, str(self.opened.source_folder), "auto")
        if source is not None:
            progress.evaluations["source"] = trainer.evaluate(source, held_out.batches)
            self.say(f"language-model loss of the source: {progress.evaluations['source']:.4f} nats per token")
        progress.evaluated_on = held_out.fingerprint

    def _saved(self, progress: Progress) -> None:
        if self.main and not progress.skipped_in_a_row:
            self.folder.diverged.unlink(missing_ok=True)

    # After training

    def _finish(self, progress: Progress, pace: Pace) -> RunSummary | None:
        state: StateDict = {}
        if self.recipe.lora is None:
            state = whole_model(self.models.student)
        else:
            gather_adapters(self.models.inner)
        summary = None
        with self.together():
            if self.main:
                summary = self._publish(state, progress, pace)
        if self.recipe.trackers:
            self.accelerator.end_training()
        return summary

    def _publish(self, state: StateDict, progress: Progress, pace: Pace) -> RunSummary:
        """Write the trained model, the curve and, last, the summary."""
        lines = [MetricsLine.from_json(line) for line in read_metrics(self.folder.metrics)]
        summary = summarise(
            self.recipe,
            progress,
            lines[-1] if lines else None,
            pace,
            measurement=measurement("uptrain", self.command, str(self.accelerator.device)),
            processes=self.accelerator.num_processes,
            model=str(self.folder.model),
            plot=str(self.folder.plot),
        )
        model = self.models.inner
        if self.recipe.lora is not None:
            model, state = merged_model(self.models.inner, self.opened.student_folder)
        export_model(model, state, self.opened.student, self.folder.model, summary.provenance(self.pinned))
        picture = draw_curve(lines, progress.evaluations)
        if picture is None:
            summary = replace(summary, plot=None)
        else:
            write_whole(self.folder.plot, picture)
        self.checkpoints.prune()  # a run may have been killed between its last checkpoint and this point
        write_json(self.folder.summary, summary.as_json())
        return summary
