"""The steps of a run, with what happens between them: logging, evaluation, checkpoints and stops."""

from gqa_convert.checkpoint.atomic_files import write_json
from gqa_convert.errors import DivergedError, StoppedError
from gqa_convert.training.checkpoints import Checkpoints, Progress
from gqa_convert.training.loop import Trainer
from gqa_convert.training.run_context import RunContext
from gqa_convert.training.run_log import RunLog
from gqa_convert.training.run_models import RunModels
from gqa_convert.training.run_text import RunText
from gqa_convert.training.saving import Saver
from gqa_convert.training.stopping import StopRequests


class RunSteps:
    """The steps of a run from its progress to its end.

    Args:
        context: the run.
        models: its models.
        text: its texts.
        trainer: takes the steps.
        checkpoints: the checkpoints of the run.
        saver: writes them.
        stops: signals that ask the run to stop.
    """

    def __init__(
        self,
        context: RunContext,
        models: RunModels,
        text: RunText,
        trainer: Trainer,
        checkpoints: Checkpoints,
        saver: Saver,
        stops: StopRequests,
    ) -> None:
        self._context, self._models, self._text, self._trainer = context, models, text, trainer
        self._checkpoints, self._saver, self._stops = checkpoints, saver, stops

    def restore(self, step: int) -> None:
        """Return to the weights and moments of a checkpoint."""
        state = self._models.state()
        self._checkpoints.load(step, state, self._context.accelerator.num_processes)
        self._models.set_state(state)

    def take(self, log: RunLog) -> None:
        """Take the remaining steps; log, evaluate and save between them.

        Raises:
            StoppedError: a signal asked to stop, and the state is saved.
            DivergedError: too many consecutive steps had no finite gradient.
            Exception: the text for the next step can't be read.
        """
        context, trainer = self._context, self._trainer
        progress, recipe, steps = trainer.progress, context.recipe, trainer.steps
        saved, batches = progress.step, self._text.held_out.batches
        context.say(
            f"{steps:,} steps of {round(trainer.tokens_per_step):,} tokens on {context.accelerator.num_processes} process(es), "
            f"from step {progress.step + 1:,}"
        )
        with self._stops.at_boundaries():
            for result in trainer.run(lambda: bool(self._stops)):
                last = result.step == steps
                evaluated = None
                if batches and (last or (recipe.evaluate_every and result.step % recipe.evaluate_every == 0)):
                    evaluated = trainer.evaluate(self._models.student, batches)
                log.write(result, evaluated)
                if result.skipped:
                    self._context.say(f"step {result.step}: the loss or a gradient is not finite; no update")
                if result.hopeless:
                    self._give_up(progress)
                if last or result.step % recipe.save_every == 0:
                    self._save(progress, log)
                    saved = progress.step
            if progress.step != steps and saved != progress.step:
                self._save(progress, log)
            self._saver.finish()
            if progress.step != steps:
                self._stop()

    def _stop(self) -> None:
        """End an incomplete run on all processes, with the reason of the first process that has one."""
        trainer = self._trainer
        step = trainer.progress.step
        done = f"after step {step} of {trainer.steps}, which is saved" if step else "before the first step"
        with self._context.together():
            if trainer.problem is not None:
                self._context.say(f"step {step} is saved, and the text for the next one can't be read")
                raise trainer.problem
            if self._stops:
                raise StoppedError(f"stopped by {self._stops.names[0]} {done}: run the same command again to resume")
        raise StoppedError(f"stopped {done}: run the same command again to resume")

    def _give_up(self, progress: Progress) -> None:
        """End a run that has diverged. When it resumes, keys that may help can be changed.

        Raises:
            DivergedError: always.
        """
        self._saver.finish()
        if self._context.main:
            write_json(self._context.folder.diverged, {"step": progress.step})
        steps = self._checkpoints.steps()
        where = f"{self._checkpoints.path(steps[-1])} is intact" if steps else "there is no checkpoint yet"
        raise DivergedError(
            f"{progress.skipped_in_a_row} consecutive steps up to step {progress.step} had a loss or a gradient that is not finite; {where}: run "
            "again with a lower learning_rate, a lower gradient_clipping or precision=no"
        )

    def _save(self, progress: Progress, log: RunLog) -> None:
        log.sync()
        self._saver.save(
            self._models.state(),
            progress,
            recipe=self._context.recipe.resolved(),
            processes=self._context.accelerator.num_processes,
            samples=self._text.samples.fingerprint,
            dataset_commits=self._text.dataset_commits,
        )
