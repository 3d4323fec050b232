"""A run: sets it up from its recipe and the state of its output folder, trains, and publishes the model."""

import json
import resource
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_optimizer_state_dict,
)

from gqa_convert.data.token_files import OnTokenize
from gqa_convert.errors import DivergedError, ResumeError, StoppedError
from gqa_convert.families.loading import read_object
from gqa_convert.processes import Say, by_first, check_agreement, join, rank, started, together
from gqa_convert.publishing.atomic_files import sync, write_json
from gqa_convert.publishing.publication import check_destination, sweep
from gqa_convert.runtime.machine import machine, measurement
from gqa_convert.sharding import number_of_shards, unwrapped
from gqa_convert.training.checkpoints import Checkpoints, Progress, state_of
from gqa_convert.training.export import export_model
from gqa_convert.training.lora import check_lora, merged_model
from gqa_convert.training.metrics import (
    OnStep,
    RunSummary,
    StepMetrics,
    check_trackers,
    read_metrics,
    recovery,
)
from gqa_convert.training.models import load_frozen, load_student, place, remove_output
from gqa_convert.training.opening import open_recipe
from gqa_convert.training.optimizers import build_optimizer, learning_rate
from gqa_convert.training.recipe import Recipe, make_recipe
from gqa_convert.training.run_folder import RunFolder
from gqa_convert.training.stopping import StopRequests
from gqa_convert.training.trainer import Trainer

_LONGEST_STREAK = 5
"""The number of consecutive steps without a finite gradient after which the run ends."""


@dataclass
class Run:
    """A run on this process. `complete` calls the other methods in their order, on every process.

    Attributes:
        recipe: the recipe of the run.
        stops: the signals received.
        on_message, on_step, on_tokenize, command: see `uptrain_checkpoint`.
        progress: how far it is.
        folder: its output folder.
        accelerator: accelerate's Accelerator of this process.
        say: passes a message on, on the main process.
        sharded: whether the models are sharded over the processes.
        checkpoints: of the run.
        opened: its models' facts and its texts, once they are known.
        trainer: what takes the steps, once models are loaded.
    """

    recipe: Recipe
    stops: StopRequests
    on_message: Say
    on_step: OnStep
    on_tokenize: OnTokenize
    command: list[str] | None

    def __post_init__(self) -> None:
        recipe = self.recipe
        self.progress = Progress()
        self.folder = RunFolder(Path(recipe.output))
        self.accelerator = join(
            log_with=list(recipe.trackers), project_dir=str(self.folder.trackers)
        )
        self.say = (lambda _: None) if rank() else self.on_message
        self.sharded = number_of_shards(recipe.sharding, started()) > 1
        self.checkpoints = Checkpoints(self.folder.checkpoints, recipe.keep_checkpoints)

    def complete(self) -> RunSummary | None:
        """Train in the output folder while no other run does; see `uptrain_checkpoint`."""
        recipe = self.recipe
        folder = self.folder
        with ExitStack() as stack:
            with together():
                check_trackers(self.accelerator, recipe)
                check_lora(recipe.lora, sharded=self.sharded)
                folder.refuse_foreign()
                if not rank():
                    stack.enter_context(folder.locked())
                    sweep(folder.path)  # what a killed run left behind
                    self.checkpoints.sweep()
            check_agreement(
                {
                    **recipe.resolved(),
                    **machine().versions,
                    "python": None,
                    "whether to shard": self.sharded,
                }
            )
            # the others may see the folder as it was a while ago
            finished, self.progress = by_first(self.find_resume_point)
            with together():
                self.checkpoints.check_seen(self.progress)
            if finished:
                self.say(
                    f"{recipe.output} is already complete: raise the budget to continue it, or name another output"
                )
                return None if rank() else finished
            self.open()
            self.load()
            self.begin()
            self.train()
            return self.finish()

    def find_resume_point(self) -> tuple[RunSummary | None, Progress]:
        """The summary of a complete run, and the progress of the newest checkpoint. Only the main process calls this.

        Raises:
            ResumeError: the output folder holds a run that this recipe can't resume.
        """
        recipe = self.recipe
        finished = self.folder.finished()
        newest = self.checkpoints.newest(self.say)
        known = finished or newest
        if known is None:
            return None, self.progress
        commits = read_object(self.folder.dataset_commits)
        earlier = make_recipe(known.recipe)
        different = earlier.differences(recipe.pinned(commits), "never")
        if recipe.budget_tokens < earlier.budget_tokens:
            different.append(
                f"the budget was {earlier.budget_tokens} tokens and is now {recipe.budget_tokens}"
            )
        if different:
            raise ResumeError(
                f"{recipe.output} holds a run with another recipe: {'; '.join(different)}; restore these keys to resume it, or name another output"
            )
        if finished and earlier.budget_tokens == recipe.budget_tokens:
            return finished, self.progress
        if newest is None:
            raise ResumeError(
                f"{recipe.output} holds a complete run without checkpoints, which can't be resumed: name another output"
            )
        return None, newest

    def open(self) -> None:
        """Open the models and the texts that the recipe names.

        Raises:
            ResumeError: a text or a model is not that of the checkpoint.
        """
        progress = self.progress
        with together():
            check_destination(self.folder.model, None, overwrite=True)
        if progress.step:
            progress.skipped_in_a_row = 0
            self.say(f"resuming from {self.checkpoints.path(progress.step)}")
            for change in make_recipe(progress.recipe).differences(
                self.recipe, "recorded", "budget"
            ):
                progress.changes.append(f"from step {progress.step + 1}: {change}")
                self.say(change)
        self.opened = open_recipe(
            self.recipe, read_object(self.folder.dataset_commits), self.on_tokenize, self.say
        )
        with together():
            for name, known in progress.inputs.items():
                if self.opened.inputs.get(name, known) != known:
                    raise ResumeError(
                        f"{name} has changed since {self.checkpoints.path(progress.step)} was saved: restore it, or "
                        "name another output"
                    )

    def load(self) -> None:
        """Load the models, and place them on the devices.

        Raises:
            RecipeError: the warm-up is longer than the run.
            ResumeError: the learning rate has fallen to 0.
        """
        device = self.accelerator.device
        samples = self.opened.samples
        with together():
            recipe, steps = self._schedule()
        torch.manual_seed(recipe.seed)
        source, *teachers = [each.local_folder for each in self.opened.models]
        with together():
            model = load_student(recipe, source, sharded=self.sharded)
        student = place(model, device, sharded=self.sharded, bf16=recipe.precision == "bf16")
        teacher = None
        for folder in teachers:
            with together():
                teacher = load_frozen(folder, device.type, sharded=self.sharded)
            teacher = place(teacher, device, sharded=self.sharded, bf16=False)
        # the losses of student and teacher are computed of logits, or of the states before them
        if remove_output(model, samples.batch([0])) and teacher:
            remove_output(teacher, samples.batch([0]))
        optimizer = build_optimizer(model, recipe)
        self.trainer = Trainer(recipe, student, optimizer, samples, steps, teacher, self.progress)

    def _schedule(self) -> tuple[Recipe, int]:
        """The recipe with its warm-up in steps, and the number of steps.

        A larger budget changes what is still to come: the warm-up stays as long as it was, and after it the learning
        rate never rises.
        """
        progress = self.progress
        tokens = self.opened.samples.tokens_per_sample
        steps = self.recipe.steps(tokens)
        if progress.warmup_steps is None:
            progress.warmup_steps = self.recipe.warmup(steps)
        recipe = replace(self.recipe, warmup_steps=progress.warmup_steps)
        if progress.step:
            earlier = replace(
                make_recipe(progress.recipe), warmup_steps=progress.warmup_steps, learning_rate=1.0
            )
            planned = earlier.steps(tokens)
            if planned < steps:
                reached = max(progress.step, progress.warmup_steps)
                progress.highest_share = min(
                    progress.highest_share, learning_rate(earlier, reached, planned)
                )
            if not progress.highest_share:
                raise ResumeError(
                    f"the learning rate of {recipe.output} has fallen to 0, so that more tokens would change nothing: "
                    "name another output, and its model/ as model; or remove the newest checkpoints"
                )
        return recipe, steps

    def begin(self) -> None:
        """Write the first files of the run, and evaluate what was not evaluated yet."""
        by_first(
            lambda: self.folder.begin(self.recipe, self.opened.dataset_commits, self.progress.step)
        )
        trainer = self.trainer
        progress = self.progress
        held_out = self.opened.held_out
        if held_out and not progress.evaluations:  # the losses relative to which recovery is stated
            for name, model in (("start", trainer.model), ("source", trainer.teacher)):
                if model:
                    loss = progress.evaluations[name] = trainer.evaluate(model, held_out)
                    self.say(
                        f"language-model loss on the evaluation data, {name}: {loss:.4f} nats per token"
                    )

    def train(self) -> None:
        """Restore a checkpoint and take the remaining steps; log, evaluate and save between them.

        Raises:
            StoppedError: a signal asked to stop, and the state is saved.
            DivergedError: too many consecutive steps had no finite gradient.
        """
        recipe = self.recipe
        trainer = self.trainer
        progress = self.progress
        held_out = self.opened.held_out
        steps = trainer.steps
        saved = progress.step
        with self.stops.at_boundaries():
            if saved:
                state = state_of(trainer.model, trainer.optimizer)
                self.checkpoints.load(saved, state)
                set_optimizer_state_dict(trainer.model, trainer.optimizer, state["optimizer"])
            settings = {name: str(value) for name, value in recipe.resolved().items()}
            self.accelerator.init_trackers("gqa-convert", settings)
            self.say(
                f"{steps:,} steps of {round(trainer.tokens_per_step):,} tokens on {started()} process(es), from step {saved + 1:,}"
            )
            for metrics in trainer.run(lambda: bool(self.stops.names)):
                step = metrics.step
                due = step == steps or step % (recipe.evaluate_every or steps) == 0
                if due and held_out:
                    metrics.evaluation_loss = trainer.evaluate(trainer.model, held_out)
                    progress.evaluations["last"] = metrics.evaluation_loss
                if due or metrics.skipped or step % recipe.log_every == 0:
                    self.log(metrics)
                if metrics.skipped:
                    self.say(f"step {step}: the loss or a gradient is not finite; no update")
                if progress.skipped_in_a_row >= _LONGEST_STREAK:
                    where = "there is no checkpoint yet"
                    if whole := self.checkpoints.whole():
                        where = f"{self.checkpoints.path(whole[0].step)} is intact"
                    raise DivergedError(
                        f"{_LONGEST_STREAK} consecutive steps up to step {step} had a loss or a gradient that is not finite; {where}: run "
                        "again with a lower learning_rate, a lower gradient_clipping or precision=no"
                    )
                if step % recipe.save_every == 0:
                    self._save()
                    saved = step
            if saved != progress.step:
                self._save()
            if progress.step < steps:
                done = "before the first step"
                if progress.step:
                    done = f"after step {progress.step} of {steps}, which is saved"
                with together():  # the reason of the first process that has one
                    if names := self.stops.names:
                        raise StoppedError(
                            f"stopped by {names[0]} {done}: run the same command again to resume"
                        )

    def log(self, metrics: StepMetrics) -> None:
        """Log a step on the main process: in the metrics file, for the caller, and in trackers."""
        if rank():
            return
        used = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if self.accelerator.device.type == "cuda":
            used = torch.cuda.max_memory_allocated()
        metrics.peak_memory_gb = round(used / 1e9, 3)
        numbers = metrics.as_json()
        with self.folder.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(numbers) + "\n")
        self.on_step(metrics, self.trainer.steps)
        del numbers["step"]
        self.accelerator.log(numbers, metrics.step)

    def _save(self) -> None:
        if not rank():
            sync(self.folder.metrics)
        self.progress.recipe = self.opened.recipe.resolved()
        self.progress.inputs = self.opened.inputs
        self.checkpoints.save(state_of(self.trainer.model, self.trainer.optimizer), self.progress)

    def finish(self) -> RunSummary | None:
        """Write the trained model and, last, the summary; returns the summary on the main process."""
        source = self.opened.models[0]
        summary = None
        model = unwrapped(self.trainer.model)
        state = {}
        if self.recipe.lora is None:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state = get_model_state_dict(self.trainer.model, options=options)
        with together():
            if not rank():
                if self.recipe.lora:
                    model, state = merged_model(model, source.local_folder)
                summary = self._summary()
                export_model(model, state, source, self.folder.model, summary.provenance())
                self.checkpoints.prune()  # a run may have been killed between its last checkpoint and this point
                write_json(self.folder.summary, summary.as_json())
        if self.recipe.trackers:
            self.accelerator.end_training()
        return summary

    def _summary(self) -> RunSummary:
        recipe = self.recipe
        progress = self.progress
        lines = read_metrics(self.folder.metrics)
        return RunSummary(
            **measurement("uptrain", self.command, str(self.accelerator.device)),
            processes=started(),
            model=str(self.folder.model),
            steps=progress.step,
            tokens=progress.tokens,
            alpha=progress.tokens / recipe.pretraining_tokens
            if recipe.pretraining_tokens
            else None,
            skipped_steps=progress.skipped,
            changes=progress.changes,
            recipe=self.opened.recipe.resolved(),
            final_loss=lines[-1].get("loss") if lines else None,
            evaluation=recovery(progress.evaluations) if self.opened.held_out else None,
            adapters=str(recipe.lora) if recipe.lora else None,
        )
