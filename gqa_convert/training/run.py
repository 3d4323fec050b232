"""One uptraining run on this process: `Run.go` continues from the state of the output folder to the trained model."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gqa_convert.checkpoint.atomic_files import write_json, write_whole
from gqa_convert.checkpoint.machine import available_memory, measurement
from gqa_convert.checkpoint.provenance import PROVENANCE, earlier_record
from gqa_convert.checkpoint.publication import check_destination, sweep
from gqa_convert.errors import DivergedError, InterruptedRunError, ResumeError, StoppedError
from gqa_convert.text.dataset_commits import DatasetCommits, find_commits
from gqa_convert.text.objectives import OBJECTIVES
from gqa_convert.text.samples import Samples, evaluation_blocks, open_samples
from gqa_convert.text.token_files import default_cache
from gqa_convert.training import memory, sharding
from gqa_convert.training.architecture import read_architecture
from gqa_convert.training.checkpoints import Checkpoints, Progress, RunRecord
from gqa_convert.training.curve import draw_curve
from gqa_convert.training.distributed import (
    gathered,
    join,
    local_processes,
    saving_group,
    together,
    wait,
    waiting_group,
)
from gqa_convert.training.documents import keep_apart
from gqa_convert.training.export import export_model
from gqa_convert.training.loop import Batch, StepResult, Trainer
from gqa_convert.training.lora import merged_model
from gqa_convert.training.masks import model_inputs
from gqa_convert.training.metrics import MetricsLine, read_metrics
from gqa_convert.training.models import load_student, place_fixed, place_student
from gqa_convert.training.opening import Opened, check_trackers, explained, open_recipe
from gqa_convert.training.optimizers import build_optimizer
from gqa_convert.training.output_lock import OutputLock
from gqa_convert.training.recipe import Recipe
from gqa_convert.training.recipe.lora import check_lora
from gqa_convert.training.resuming import look_back, take_up
from gqa_convert.training.retention import Keeping
from gqa_convert.training.run_folder import RunFolder
from gqa_convert.training.run_log import OnStep, RunLog
from gqa_convert.training.saving import Saver
from gqa_convert.training.state import StateDict, set_state, state_of, whole_model
from gqa_convert.training.stopping import StopRequests
from gqa_convert.training.summary import Pace, RunSummary, summarise
from gqa_convert.training.teacher import load_teacher, round_teacher, rounds_teacher
from gqa_convert.training.trackers import start_trackers

_MOST_ROUNDING = 0.01
"""Nats per token by which a rounded teacher may differ before float32 is recommended; a fitted student that needs
uptraining differs by a multiple of it.
"""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The held-out text of a run, in batches; empty without evaluation_data.

    Attributes:
        batches: batches of the size of a micro-batch.
        fingerprint: a hash of the text and the settings.
    """

    batches: tuple[Batch, ...] = ()
    fingerprint: str = ""


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
        trackers = str(self.folder.trackers) if recipe.trackers else None
        self.accelerator = join(log_with=list(recipe.trackers) or None, project_dir=trackers)
        self.main = bool(self.accelerator.is_main_process)
        self.wait, self.together = partial(wait, self.accelerator), partial(together, self.accelerator)
        with self.together():
            processes = self.accelerator.num_processes
            self.layout = sharding.layout_of(recipe.sharding, recipe.shard_size, processes, local_processes())
            check_lora(recipe.lora, sharded=self.layout.sharded)
        self.say = on_message if self.main else lambda _: None
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
        self._pin_datasets(record.dataset_commits if record else self.folder.read_commits())
        samples, held_out = self._open_samples(), self._open_held_out()
        self._check_same_samples(record, samples)
        steps = self.recipe.steps(samples.tokens_per_sample)
        self.recipe.warmup(steps)  # raises an error if the warm-up is longer than the run
        self._say_memory(samples)

        torch.manual_seed(self.recipe.seed)
        self._load_student()
        teacher = self._load_teacher(samples)
        trainer = Trainer(
            self.recipe,
            self.model,
            self.optimizer,
            samples,
            self.accelerator,
            steps=steps,
            teacher=teacher,
            progress=progress,
        )
        with self.together():
            self._begin_files()
        self._evaluate_start_and_source(trainer, held_out)
        if record:
            with self.stops.at_boundaries():
                self._restore(progress.step)
        with self.together():
            log = RunLog(self.folder.metrics, progress.step, trainer, self.on_step, main=self.main)
        start_trackers(self.accelerator, self.recipe, self.folder.tracker_runs, main=self.main)

        began, first_step, first_token = time.monotonic(), progress.step, progress.tokens
        try:
            self._train(trainer, log, held_out)
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
        rewinds = recipe.spike is not None and recipe.spike.action == "rewind"
        return Checkpoints(
            self.folder.checkpoints,
            Keeping(
                recipe.keep_checkpoints, recipe.keep_every, recipe.keep_best, recipe.save_every if rewinds else None
            ),
            main=self.main,
            together=partial(together, self.accelerator, group),
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

    def _pin_datasets(self, known: DatasetCommits) -> None:
        """Set `pinned`, the recipe with the commits of its Hub datasets. The main process finds commits that are not
        known, so that all machines read the same text.
        """
        recipe, found = self.recipe, DatasetCommits()
        with self.together():
            if self.main:
                found = find_commits((*recipe.data, *(recipe.evaluation_data or ())), known, default_cache())
        self.dataset_commits: DatasetCommits = gathered(self.accelerator, found)[0]
        self.pinned = recipe.pinned(self.dataset_commits)

    def _text_settings(self) -> dict[str, Any]:
        """The settings that training and held-out samples share."""
        return {
            "objective": self.opened.objective,
            "sequence_length": self.opened.sequence_length,
            "document_mask": self.recipe.document_mask,
            "decoder_start": self.opened.decoder_start,
            "starts_with_last": self.opened.starts_with_last,
            "is_local_main": self.accelerator.is_local_main_process,
            "wait": self.wait,
            "progress": self.on_tokenize,
        }

    def _open_samples(self) -> Samples:
        with self.together():
            samples = open_samples(
                self.pinned.data,
                self.opened.tokenizer,
                seed=self.recipe.seed,
                shuffle_window=self.recipe.shuffle_window,
                **self._text_settings(),
            )
        for note in samples.notes:
            self.say(note)
        self.fingerprint = samples.fingerprint
        return samples

    def _open_held_out(self) -> HeldOut:
        if self.pinned.evaluation_data is None:
            return HeldOut()
        with self.together():
            blocks = evaluation_blocks(
                self.pinned.evaluation_data,
                self.opened.tokenizer,
                tokens=self.recipe.evaluation_tokens,
                **self._text_settings(),
            )
        size = self.recipe.micro_batch_size
        batches = (blocks.batch(range(at, min(at + size, len(blocks)))) for at in range(0, len(blocks), size))
        return HeldOut(tuple(batches), blocks.fingerprint)

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
            shards=self.layout.shards,
            device=self.accelerator.device.type,
        )
        free = available_memory(self.accelerator.device, local_processes())
        self.say(memory.shown(memory.plan(architecture, setting), free))

    # Models

    def _load_student(self) -> None:
        """Set `inner`, the transformers model; `model`, its wrapper for several processes; and `optimizer`."""
        with self.together():
            self.inner = load_student(self.recipe, self.opened.student_folder, self.layout)
        self.model = place_student(self.inner, self.accelerator, self.layout, bf16=self.recipe.precision == "bf16")
        self._check_apart(self.recipe.model, self.inner)
        self.optimizer = build_optimizer(self.inner, self.recipe)

    def _load_teacher(self, samples: Samples) -> Any:
        """Load the teacher, if the recipe names one. With `compile`, student and teacher are compiled from now on."""
        teacher = None
        if self.opened.teacher_folder is not None:
            assert self.opened.teacher is not None
            dtype = self.recipe.teacher_dtype
            rounds = rounds_teacher(dtype, memory.bytes_each(self.opened.teacher), self.accelerator.device.type)
            if rounds and self.layout.sharded:
                dtype = "bf16"
            teacher = self._load_fixed(self.opened.teacher_folder, str(self.recipe.teacher), dtype)
            if rounds and not self.layout.sharded:
                self._round_teacher(teacher, samples)
        if self.recipe.compile:
            self.model.compile()
            if teacher is not None:
                teacher.compile()
        return teacher

    def _round_teacher(self, teacher: Any, samples: Samples) -> None:
        """Convert the teacher to bfloat16, and report what that changes on the first samples."""
        with self.together():
            tensors = {
                name: torch.from_numpy(array).to(self.accelerator.device)
                for name, array in samples.batch(range(self.recipe.micro_batch_size)).items()
            }
            labels = tensors.pop("labels")
            divergence = round_teacher(teacher, model_inputs(teacher, tensors), labels)
        advice = ": set teacher_dtype to float32 to keep it exact" if divergence > _MOST_ROUNDING else ""
        self.say(f"the teacher runs in bfloat16, with a KL of {divergence:.2g} nats per token from its float32{advice}")

    def _load_fixed(self, folder: Path, name: str, dtype: str) -> Any:
        """Load a model that is not trained."""
        with self.together(), explained(name):
            model = load_teacher(folder, dtype, "cpu", by_first=self.layout.sharded)
        model = place_fixed(model, self.accelerator, self.layout)
        self._check_apart(name, model)
        return model

    def _check_apart(self, name: str, model: Any) -> None:
        """If `document_mask` is set, refuse a model in which documents in one row affect each other."""
        if self.recipe.document_mask:
            autocast = model is self.inner and self.recipe.precision == "bf16" and not self.layout.sharded
            with self.together():
                note = keep_apart(name, model, self.recipe.dropout, autocast=autocast)
            if note is not None:
                self.say(note)
            sharding.reshard(model)

    # Training

    def _begin_files(self) -> None:
        """Write the first files of the run, after which the folder belongs to it."""
        if self.main:
            self.folder.write_recipe(self.recipe)
            if self.dataset_commits:
                write_json(self.folder.dataset_commits, self.dataset_commits)
            self.folder.summary.unlink(missing_ok=True)

    def _evaluate_start_and_source(self, trainer: Trainer, held_out: HeldOut) -> None:
        """Measure the losses at the start and of the source, relative to which recovery is stated, unless they are
        recorded.
        """
        progress = trainer.progress
        if not held_out.batches or progress.evaluated_on == held_out.fingerprint:
            return
        progress.evaluations = {"start": trainer.evaluate(self.model, held_out.batches)}
        self.say(
            f"language-model loss at the start: {progress.evaluations['start']:.4f} nats per token of the evaluation data"
        )
        source = trainer.teacher
        if source is None and self.opened.source_folder is not None:
            source = self._load_fixed(self.opened.source_folder, str(self.opened.source_folder), "auto")
        if source is not None:
            progress.evaluations["source"] = trainer.evaluate(source, held_out.batches)
            self.say(f"language-model loss of the source: {progress.evaluations['source']:.4f} nats per token")
        progress.evaluated_on = held_out.fingerprint

    def _train(self, trainer: Trainer, log: RunLog, held_out: HeldOut) -> None:
        """Take the remaining steps; log, evaluate and save between them.

        Raises:
            StoppedError: a signal asked to stop, and the state is saved.
            DivergedError: too many consecutive steps had no finite gradient.
            Exception: the text for the next step can't be read.
        """
        progress, recipe, steps = trainer.progress, self.recipe, trainer.steps
        saved = progress.step
        self.say(
            f"{steps:,} steps of {round(trainer.tokens_per_step):,} tokens on {self.accelerator.num_processes} process(es), "
            f"from step {progress.step + 1:,}"
        )
        with self.stops.at_boundaries():
            for result in trainer.run(lambda: bool(self.stops)):
                last = result.step == steps
                evaluated = None
                if held_out.batches and (last or (recipe.evaluate_every and result.step % recipe.evaluate_every == 0)):
                    evaluated = trainer.evaluate(self.model, held_out.batches)
                progress.evaluation = evaluated
                log.write(result, evaluated)
                if result.spiked:
                    self._report_spike(result)
                elif result.skipped:
                    self.say(f"step {result.step}: the loss or a gradient is not finite; no update")
                if result.hopeless:
                    self._give_up(progress)
                if result.rewinds:
                    self._rewind(progress)
                if last or result.step % recipe.save_every == 0:
                    self._save(progress, log)
                    saved = progress.step
            if progress.step != steps and saved != progress.step:
                self._save(progress, log)
            self.saver.finish()
            if progress.step != steps:
                self._stop(trainer)

    def _report_spike(self, result: StepResult) -> None:
        self.say(
            f"step {result.step}: the loss {result.loss:.4g} or the gradient norm {result.gradient_norm:.4g} jumped; no update"
        )

    def _rewind(self, progress: Progress) -> None:
        """Return to the weights and moments of the newest regular checkpoint from before the steps that jumped. The
        schedule and the samples go on.
        """
        rule = self.recipe.spike
        assert rule is not None
        self.saver.finish()
        steps = [
            step
            for step in self.checkpoints.steps()
            if step % self.recipe.save_every == 0 and step <= progress.step - rule.patience
        ]
        if not steps:
            self.say(f"step {progress.step}: there is no checkpoint from before these steps to return to")
            return
        self._restore(steps[-1])
        progress.spikes.rewinds += 1
        change = f"after step {progress.step}: weights and moments of step {steps[-1]}, because {rule.patience} steps in a row jumped"
        progress.changes.append(change)
        self.say(change)

    def _stop(self, trainer: Trainer) -> None:
        """End an incomplete run on all processes, with the reason of the first process that has one."""
        step = trainer.progress.step
        done = f"after step {step} of {trainer.steps}, which is saved" if step else "before the first step"
        with self.together():
            if trainer.problem is not None:
                self.say(f"step {step} is saved, and the text for the next one can't be read")
                raise trainer.problem
            if self.stops:
                raise StoppedError(f"stopped by {self.stops.names[0]} {done}: run the same command again to resume")
        raise StoppedError(f"stopped {done}: run the same command again to resume")

    def _give_up(self, progress: Progress) -> None:
        """End a run that has diverged. When it resumes, keys that may help can be changed.

        Raises:
            DivergedError: always.
        """
        self.saver.finish()
        if self.main:
            write_json(self.folder.diverged, {"step": progress.step})
        steps = self.checkpoints.steps()
        where = f"{self.checkpoints.path(steps[-1])} is intact" if steps else "there is no checkpoint yet"
        raise DivergedError(
            f"{progress.skipped_in_a_row} consecutive steps up to step {progress.step} had a loss or a gradient that is not finite; {where}: run "
            "again with a lower learning_rate, a lower gradient_clipping or precision=no"
        )

    def _save(self, progress: Progress, log: RunLog) -> None:
        log.sync()
        self.saver.save(
            state_of(self.model, self.optimizer, trained_only=self.recipe.lora is not None),
            progress,
            recipe=self.recipe.resolved(),
            processes=self.accelerator.num_processes,
            samples=self.fingerprint,
            dataset_commits=self.dataset_commits,
        )

    def _saved(self, progress: Progress) -> None:
        if self.main and not progress.skipped_in_a_row:
            self.folder.diverged.unlink(missing_ok=True)

    def _restore(self, step: int) -> None:
        only = self.recipe.lora is not None
        state = state_of(self.model, self.optimizer, trained_only=only)
        self.checkpoints.load(step, state, self.accelerator.num_processes)
        set_state(self.model, self.optimizer, state, trained_only=only)

    # After training

    def _finish(self, progress: Progress, pace: Pace) -> RunSummary | None:
        state = whole_model(self.model) if self.recipe.lora is None else {}
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
        model = self.inner
        if self.recipe.lora is not None:
            model, state = merged_model(self.inner, self.opened.student_folder)
        export_model(model, state, self.opened.student, self.folder.model, summary.provenance(self.pinned))
        picture = draw_curve(lines, progress.evaluations)
        if picture is None:
            summary = replace(summary, plot=None)
        else:
            write_whole(self.folder.plot, picture)
        self.checkpoints.prune()  # a run may have been killed between its last checkpoint and this point
        write_json(self.folder.summary, summary.as_json())
        return summary
