"""One uptraining run on this process, from what its output holds to the trained model."""

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gqa_convert.checkpoint.atomic_files import write_json, write_whole
from gqa_convert.checkpoint.machine import available_memory, measurement
from gqa_convert.checkpoint.provenance import PROVENANCE, earlier_record
from gqa_convert.checkpoint.publication import check_destination, sweep
from gqa_convert.errors import DivergedError, ResumeError, StoppedError
from gqa_convert.text.objectives import OBJECTIVES
from gqa_convert.text.samples import evaluation_blocks, open_samples
from gqa_convert.training import memory, sharding
from gqa_convert.training.checkpoints import Checkpoints, Progress
from gqa_convert.training.curve import draw_curve
from gqa_convert.training.distributed import gathered, join, local_processes, together, wait
from gqa_convert.training.documents import check_apart
from gqa_convert.training.export import export_model
from gqa_convert.training.loop import StepResult, Trainer
from gqa_convert.training.metrics import Metrics, read_metrics
from gqa_convert.training.models import load_student, place_fixed, place_student
from gqa_convert.training.opening import check_trackers, explained, open_recipe
from gqa_convert.training.optimizers import build_optimizer
from gqa_convert.training.output_lock import OutputLock
from gqa_convert.training.recipe import Recipe
from gqa_convert.training.resuming import look_back, take_up
from gqa_convert.training.run_folder import RunFolder
from gqa_convert.training.state import set_state, state_of, whole_model
from gqa_convert.training.stopping import StopRequests
from gqa_convert.training.summary import summarise
from gqa_convert.training.teacher import load_teacher

OnStep = Callable[[dict[str, Any]], None]
"""Called on the main process with every line of the metrics file, and `steps` of the whole run."""


class Run:
    """One run, on this process."""

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
        self.say = on_message if self.main else lambda _: None
        self.on_step, self.on_tokenize, self.command = on_step, on_tokenize, command
        self.checkpoints = Checkpoints(
            self.folder.checkpoints,
            recipe.keep_checkpoints,
            main=self.main,
            together=self.together,
            process=self.accelerator.process_index,
            gather=partial(gathered, self.accelerator),
        )
        self.lock: Any = None

    def go(self) -> dict[str, Any]:
        """From what the output holds to the trained model."""
        with self.together():
            self._take_output()
        finished, record = self._look_back()
        if finished is not None:
            self.say(f"{self.recipe.output} is complete already; a larger budget or another output would train on")
            return finished if self.main else {}
        with self.together():
            check_destination(self.folder.model, None, overwrite=True)
        progress = self._progress(record)
        with self.together():
            self.opened = open_recipe(self.recipe)
            converted = earlier_record(self.opened.student)
        if converted is None:
            self.say(
                f"{self.recipe.model} has no {PROVENANCE}, so that gqa-convert has not converted it: it is trained as it is"
            )
        samples, evaluation = self._data()
        self.fingerprint = samples.fingerprint
        if record and record["samples"] != samples.fingerprint:
            raise ResumeError(
                f"the training text or the tokenizer is not what it was when {self.checkpoints.path(progress.step)} was saved: restore it, "
                "or name another output"
            )
        steps = self.recipe.steps(samples.tokens_per_sample)
        self.recipe.warmup(steps)
        torch.manual_seed(self.recipe.seed)
        if estimate := self._memory(samples.longest):
            self.say(estimate)
        with self.together():
            self.inner = load_student(self.recipe, self.opened.student_folder)
        self.model = place_student(self.inner, self.accelerator, bf16=self.recipe.precision == "bf16")
        self._check_apart(self.recipe.model, self.inner)
        self.optimizer = build_optimizer(self.inner, self.recipe)
        teacher = None
        if self.opened.teacher_folder is not None:
            teacher = self._load_fixed(self.opened.teacher_folder, str(self.recipe.teacher), self.recipe.teacher_dtype)
        if self.recipe.compile:
            self.model.compile()
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
        self._first_evaluations(trainer, teacher, *evaluation)
        if record:
            with self.stops.at_boundaries():
                self._restore(progress.step)
        with self.together():
            metrics = Metrics(self.folder.metrics, progress.step) if self.main else None
        self._start_trackers()
        began, step_before, tokens_before = time.monotonic(), progress.step, progress.tokens
        try:
            self._train(trainer, metrics, evaluation[0])
        finally:
            if metrics:
                with suppress(OSError):  # what was to be saved is; the file system is full or gone
                    metrics.close()
            samples.close()
        seconds = time.monotonic() - began
        pace = {
            "processes": self.accelerator.num_processes,
            "steps_since_resumption": steps - step_before,
            "seconds_since_resumption": round(seconds, 1),
            "tokens_per_second": round((progress.tokens - tokens_before) / max(seconds, 1e-3)),
        }
        return self._finish(progress, pace)

    def release(self) -> None:
        """Let others use the output."""
        if self.lock is not None:
            self.lock.release()

    def _take_output(self) -> None:
        """Lock the output for this run, and remove what a run that died left unfinished."""
        self.folder.refuse_foreign()
        if self.main:
            self.lock = OutputLock(self.folder.path)
            sweep(self.folder.path)
            self.checkpoints.sweep()

    def _look_back(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """The summary of a complete run, or the record of the newest checkpoint whose files hold what was written."""
        while True:
            with self.together():
                finished, record = look_back(self.recipe, self.folder, self.checkpoints)
            if record is None:
                return finished, None
            if self.checkpoints.is_intact(int(record["progress"]["step"]), record, self.accelerator.num_processes):
                return None, record

    def _progress(self, record: dict[str, Any] | None) -> Progress:
        """Where the run is; damaged checkpoints after it are set aside."""
        if record is None:
            return Progress()
        step = int(record["progress"]["step"])
        with self.together():
            aside = self.checkpoints.set_aside_after(step) if self.main else []
        for path, problem in aside:
            self.say(f"a checkpoint is damaged ({problem}) and was renamed to {path}: going back to the one before it")
        self.say(f"going on from {self.checkpoints.path(step)}")
        return take_up(record, self.recipe, self.folder, self.accelerator.num_processes, self.say)

    def _data(self) -> tuple[Any, tuple[list[Any], str]]:
        """Training samples; batches of evaluation data and their fingerprint."""
        common: dict[str, Any] = {
            "objective": self.opened.objective,
            "sequence_length": self.opened.sequence_length,
            "document_mask": self.recipe.document_mask,
            "decoder_start": self.opened.decoder_start,
            "starts_with_last": self.opened.starts_with_last,
            "is_local_main": self.accelerator.is_local_main_process,
            "wait": self.wait,
            "progress": self.on_tokenize,
        }
        with self.together():
            samples = open_samples(list(self.recipe.data), self.opened.tokenizer, seed=self.recipe.seed, **common)
        for note in samples.notes:
            self.say(note)
        if self.recipe.evaluation_data is None:
            return samples, ([], "")
        with self.together():
            blocks = evaluation_blocks(
                list(self.recipe.evaluation_data), self.opened.tokenizer, tokens=self.recipe.evaluation_tokens, **common
            )
        size = self.recipe.micro_batch_size
        batches = [blocks.batch(range(at, min(at + size, len(blocks)))) for at in range(0, len(blocks), size)]
        return samples, (batches, blocks.fingerprint)

    def _memory(self, longest: tuple[int, int] | None) -> str | None:
        """The estimate of what this run needs, where the model's sizes are known; on the main process.

        Args:
            longest: tokens of the longest encoder input and target, where the data decide that.
        """
        opened = self.opened
        architecture = memory.read_architecture(opened.student.config)
        if architecture is None or not self.main:
            return None
        length, target = longest or (
            opened.sequence_length,
            OBJECTIVES[opened.objective].target_length(opened.sequence_length),
        )
        setting = memory.setting_of(
            self.recipe,
            **memory.parameters_of(opened.student, opened.teacher, self.recipe),
            sequence_length=length,
            target_length=target,
            processes=self.accelerator.num_processes,
            sharded=sharding.wanted(),
            device=self.accelerator.device.type,
        )
        return memory.shown(
            memory.plan(architecture, setting), available_memory(self.accelerator.device, local_processes())
        )

    def _load_fixed(self, folder: Path, name: str, dtype: str) -> Any:
        """A model that is asked and does not learn."""
        with self.together(), explained(name):
            model = load_teacher(folder, dtype, "cpu")
        model = place_fixed(model, self.accelerator)
        self._check_apart(name, model)
        return model

    def _check_apart(self, name: str, model: Any) -> None:
        """See that the model keeps documents apart, where it must."""
        if self.recipe.document_mask:
            with self.together():
                check_apart(name, model)
            sharding.reshard(model)

    def _begin_files(self) -> None:
        """From here on the folder is this run's, and not complete."""
        if self.main:
            self.folder.write_recipe(self.recipe)
            self.folder.summary.unlink(missing_ok=True)

    def _first_evaluations(self, trainer: Trainer, teacher: Any, batches: list[Any], fingerprint: str) -> None:
        """The losses between which the recovery is measured, at the start and of the source, unless they are known."""
        progress = trainer.progress
        if not batches or progress.evaluated_on == fingerprint:
            return
        progress.evaluations = {"start": trainer.evaluate(self.model, batches)}
        self.say(f"loss at the start: {progress.evaluations['start']:.4f} nats per token of the evaluation data")
        source = teacher
        if source is None and self.opened.source_folder is not None:
            source = self._load_fixed(self.opened.source_folder, str(self.opened.source_folder), "auto")
        if source is not None:
            progress.evaluations["source"] = trainer.evaluate(source, batches)
            self.say(f"loss of the source: {progress.evaluations['source']:.4f}")
        progress.evaluated_on = fingerprint

    def _train(self, trainer: Trainer, metrics: Metrics | None, evaluation: list[Any]) -> None:
        """The steps that are left, with what belongs between them."""
        progress, recipe, steps = trainer.progress, self.recipe, trainer.steps
        saved, tokens_per_step = progress.step, round(trainer.samples_per_step * trainer.samples.tokens_per_sample)
        self.say(
            f"{steps:,} steps of {tokens_per_step:,} tokens on {self.accelerator.num_processes} process(es), from step {progress.step + 1:,}"
        )
        with self.stops.at_boundaries():
            for result in trainer.run(lambda: bool(self.stops)):
                last = result.step == steps
                evaluated = None
                if evaluation and (last or (recipe.evaluate_every and result.step % recipe.evaluate_every == 0)):
                    evaluated = trainer.evaluate(self.model, evaluation)
                if metrics and (last or evaluated is not None or result.skipped or result.step % recipe.log_every == 0):
                    self._log(metrics, result, evaluated, trainer)
                if result.skipped:
                    self.say(f"step {result.step}: the loss or a gradient is not finite; no update")
                if result.hopeless:
                    self._give_up(progress)
                if last or result.step % recipe.save_every == 0:
                    self._save(progress, metrics)
                    saved = progress.step
            if progress.step == steps:
                return
            if saved != progress.step:
                self._save(progress, metrics)
            done = (
                f"after step {progress.step} of {steps}, which is saved" if progress.step else "before the first step"
            )
            with self.together():  # whoever knows the reason says it, and the first of them aloud
                if trainer.problem is not None:
                    self.say(f"step {progress.step} is saved, and the text for the next one can't be read")
                    raise trainer.problem
                if self.stops:
                    raise StoppedError(f"stopped by {self.stops.names[0]} {done}: run the same command again to go on")
        raise StoppedError(f"stopped {done}: run the same command again to go on")

    def _log(self, metrics: Metrics, result: StepResult, evaluated: float | None, trainer: Trainer) -> None:
        def finite(value: float | None) -> float | None:
            return value if value is not None and abs(value) < float("inf") else None

        rate = float(trainer.samples_per_step * trainer.samples.tokens_per_sample) / result.seconds
        line = {
            "step": result.step,
            "tokens": result.tokens,
            "loss": finite(result.loss),
            "lm": finite(result.lm),
            "kl": finite(result.kl),
            "attention": finite(result.attention),
            "learning_rate": result.learning_rate,
            "gradient_norm": finite(result.gradient_norm),
            "tokens_per_second": round(rate, 1),
            "mfu": trainer.utilisation(rate),
            "evaluation_loss": finite(evaluated),
            "skipped": True if result.skipped else None,
        }
        metrics.write(**line)
        self.on_step(line | {"steps": trainer.steps})
        if self.recipe.trackers:
            numbers = {key: value for key, value in line.items() if isinstance(value, int | float) and key != "step"}
            self.accelerator.log(numbers, step=result.step)

    def _give_up(self, progress: Progress) -> None:
        """Training has no sense any more; from here on, keys that may help may change.

        Raises:
            DivergedError: always.
        """
        if self.main:
            write_json(self.folder.diverged, {"step": progress.step})
        steps = self.checkpoints.steps()
        where = f"{self.checkpoints.path(steps[-1])} is intact" if steps else "there is no checkpoint yet"
        raise DivergedError(
            f"{progress.skipped_in_a_row} steps in a row up to step {progress.step} had a loss or a gradient that is not finite; {where}: run "
            "again with a lower learning_rate, a lower gradient_clipping or precision=no"
        )

    def _save(self, progress: Progress, metrics: Metrics | None) -> None:
        if metrics:
            metrics.sync()
        self.checkpoints.save(
            state_of(self.model, self.optimizer),
            progress,
            self.recipe.resolved(),
            self.accelerator.num_processes,
            self.fingerprint,
        )
        if self.main and not progress.skipped_in_a_row:
            self.folder.diverged.unlink(missing_ok=True)

    def _restore(self, step: int) -> None:
        state = state_of(self.model, self.optimizer)
        self.checkpoints.load(step, state, self.accelerator.num_processes)
        set_state(self.model, self.optimizer, state)

    def _start_trackers(self) -> None:
        if self.recipe.trackers:
            settings = self.recipe.resolved()
            flat = {
                key: value if isinstance(value, int | float | str | bool) else str(value)
                for key, value in settings.items()
            }
            self.accelerator.init_trackers("gqa-convert", config=flat)

    def _finish(self, progress: Progress, pace: dict[str, Any]) -> dict[str, Any]:
        state = whole_model(self.model)
        summary: dict[str, Any] = {}
        with self.together():
            if self.main:
                summary = self._publish(state, progress, pace)
        if self.recipe.trackers:
            self.accelerator.end_training()
        return summary

    def _publish(self, state: dict[str, Any], progress: Progress, pace: dict[str, Any]) -> dict[str, Any]:
        """The trained model, the curve and, last, the summary."""
        lines = read_metrics(self.folder.metrics)
        head = measurement("uptrain", self.command, str(self.accelerator.device)) | {
            "processes": self.accelerator.num_processes
        }
        figures = summarise(self.recipe, progress, lines)
        summary = {**head, "model": str(self.folder.model), **figures, **pace, "plot": str(self.folder.plot)}
        record = {
            **head,
            **{key: figures[key] for key in ("tokens", "evaluation", "changes")},
            "recipe": self.recipe.resolved(),
        }
        export_model(self.inner, state, self.opened.student, self.folder.model, record)
        try:
            write_whole(self.folder.plot, draw_curve(lines, progress.evaluations))
        except ImportError:
            summary["plot"] = None
        self.checkpoints.prune()  # had the run been killed between the last checkpoint's appearance and that
        write_json(self.folder.summary, summary)
        return summary
