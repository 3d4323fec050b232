"""The training loop. A step is a pure function of the state before it, and samples and random numbers depend only on
the number of the step. A resumed run therefore computes exactly what an uninterrupted one does.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gqa_convert.data.labels import IGNORED
from gqa_convert.data.order import mix
from gqa_convert.data.samples import Samples
from gqa_convert.errors import DivergedError, InterruptedRunError, StoppedError
from gqa_convert.losses.distillation import CombinedLoss, combined_loss, labelled_positions
from gqa_convert.losses.output_layer import removed_output_layer
from gqa_convert.training import sharding
from gqa_convert.training.checkpoints import Checkpoints, Progress, state_of
from gqa_convert.training.distributed import summed
from gqa_convert.training.masks import model_inputs
from gqa_convert.training.metrics import RunLog
from gqa_convert.training.recipe import Recipe
from gqa_convert.training.run_context import RunContext
from gqa_convert.training.run_text import Batch, RunText
from gqa_convert.training.schedules import learning_rate
from gqa_convert.training.stopping import StopRequests
from gqa_convert.training.teacher import teacher_logits

_LONGEST_STREAK = 5
"""The number of consecutive steps without a finite gradient after which the run ends."""


def train(
    context: RunContext,
    trainer: "Trainer",
    text: RunText,
    checkpoints: Checkpoints,
    log: RunLog,
    stops: StopRequests,
) -> None:
    """Take the remaining steps; log, evaluate and save between them.

    Raises:
        StoppedError: a signal asked to stop, and the state is saved.
        DivergedError: too many consecutive steps had no finite gradient.
        Exception: the text for the next step can't be read.
    """
    recipe, progress, steps = context.recipe, trainer.progress, trainer.steps
    saved = progress.step

    def save() -> None:
        log.sync()
        checkpoints.save(
            state_of(trainer.model, trainer.optimizer, trained_only=context.adapters_only),
            progress,
            recipe=recipe.resolved(),
            processes=context.accelerator.num_processes,
            samples=text.samples.fingerprint,
            dataset_commits=text.dataset_commits,
        )

    context.say(
        f"{steps:,} steps of {round(trainer.tokens_per_step):,} tokens on {context.accelerator.num_processes} process(es), "
        f"from step {progress.step + 1:,}"
    )
    with stops.at_boundaries():
        for result in trainer.run(lambda: bool(stops)):
            last = result.step == steps
            due = recipe.evaluate_every is not None and result.step % recipe.evaluate_every == 0
            evaluated = None
            if text.held_out and (last or due):
                evaluated = trainer.evaluate(trainer.model, text.held_out)
            if last or due or result.skipped or result.step % recipe.log_every == 0:
                log.write(result, evaluated)
            if result.skipped:
                context.say(f"step {result.step}: the loss or a gradient is not finite; no update")
            if progress.skipped_in_a_row >= _LONGEST_STREAK:
                raise _diverged(progress, checkpoints)
            if last or result.step % recipe.save_every == 0:
                save()
                saved = progress.step
        if progress.step < steps:
            if saved != progress.step:
                save()
            _stop(context, trainer, stops)


def _diverged(progress: Progress, checkpoints: Checkpoints) -> DivergedError:
    where = "there is no checkpoint yet"
    if steps := checkpoints.steps():
        where = f"{checkpoints.path(steps[-1])} is intact"
    return DivergedError(
        f"{progress.skipped_in_a_row} consecutive steps up to step {progress.step} had a loss or a gradient that is not finite; {where}: run "
        "again with a lower learning_rate, a lower gradient_clipping or precision=no"
    )


def _stop(context: RunContext, trainer: "Trainer", stops: StopRequests) -> None:
    """End an incomplete run on all processes, with the reason of the first process that has one."""
    step = trainer.progress.step
    done = "before the first step"
    if step:
        done = f"after step {step} of {trainer.steps}, which is saved"
    with context.together():
        if trainer.problem is not None:
            context.say(f"step {step} is saved, and the text for the next one can't be read")
            raise trainer.problem
        if stops:
            raise StoppedError(f"stopped by {stops.names[0]} {done}: run the same command again to resume")
    raise StoppedError(f"stopped {done}: run the same command again to resume")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of one optimizer step, over all processes."""

    step: int
    tokens: int
    """Tokens of text since the beginning of the run."""
    loss: float
    """The minimised loss, in nats per token."""
    lm: float | None
    kl: float | None
    learning_rate: float
    gradient_norm: float
    tokens_per_second: float
    skipped: bool
    """The loss or a gradient was not finite, and nothing was changed."""


class Trainer:
    """Takes the optimizer steps of a run.

    Args:
        recipe: the settings.
        model: the model or its wrapper for several processes, in training mode.
        optimizer: the optimizer of its trained parameters.
        samples: the training data.
        accelerator: accelerate's Accelerator, of which only the processes and devices are used.
        steps: the number of steps in the whole run.
        teacher: the model to distil from.
        progress: the progress of the run, which is kept up to date.

    Attributes:
        problem: the error of reading text, if that ended the run.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: Any,
        optimizer: torch.optim.Optimizer,
        samples: Samples,
        accelerator: Any,
        *,
        steps: int,
        teacher: Any,
        progress: Progress,
    ) -> None:
        self.recipe, self.model, self.optimizer, self.samples = recipe, model, optimizer, samples
        self.accelerator, self.steps, self.teacher, self.progress = accelerator, steps, teacher, progress
        self.problem: Exception | None = None
        self.samples_per_step = recipe.samples_per_step(samples.tokens_per_sample)
        self.tokens_per_step = float(self.samples_per_step * samples.tokens_per_sample)
        self._weight = 0.0
        if teacher is not None:
            self._weight = 1.0 if recipe.distillation_weight is None else recipe.distillation_weight
        self._trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._autocast = recipe.precision == "bf16" and not sharding.is_sharded(model)

    def run(self, stop: Callable[[], bool]) -> Iterator[StepResult]:
        """Take the remaining steps one by one. The generator ends early, between two steps, if `stop` returns true or
        reading text fails on any process.
        """
        for step in range(self.progress.step + 1, self.steps + 1):
            began = time.perf_counter()
            batches: list[Batch] = []
            try:
                batches = self.micro_batches(step)
            except InterruptedRunError:  # a second Ctrl-C
                raise
            except Exception as problem:
                self.problem = problem
            labels = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)
            ends = not batches or stop()
            count, stops = summed(self.accelerator, [float(labels), float(ends)], patiently=True)
            if stops:
                return
            yield self._step(step, batches, max(count, 1.0), began)

    def micro_batches(self, step: int) -> list[Batch]:
        """This process's share of a step's samples, the same number of batches on every process; surplus samples have
        ignored labels.
        """
        processes, size = self.accelerator.num_processes, self.recipe.micro_batch_size
        first = (step - 1) * self.samples_per_step
        most = -(-self.samples_per_step // processes)
        own = range(first + self.accelerator.process_index, first + self.samples_per_step, processes)
        batches = [self.samples.batch(own[at : at + size]) for at in range(0, len(own), size)]
        while len(batches) < -(-most // size):
            filler = self.samples.batch([first])
            filler["labels"] = np.full_like(filler["labels"], IGNORED)
            batches.append(filler)
        return batches

    def _step(self, step: int, batches: list[Batch], count: float, began: float) -> StepResult:
        torch.manual_seed(mix(self.recipe.seed, step, self.accelerator.process_index))  # dropout
        rate = learning_rate(self.recipe, step, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # read once at the end, so that the GPU is not synchronised in between
        parts = torch.zeros(3, dtype=torch.float64, device=self.accelerator.device)
        for number, batch in enumerate(batches):
            sharding.set_gradient_sync(self.model, number == len(batches) - 1)
            loss, found = self.losses(batch)
            # turns the mean over processes, which DDP and FSDP compute, into the sum over all tokens divided by their
            # number
            (loss * (self.accelerator.num_processes / count)).backward()
            parts += found
        norm = self._clip()
        total, lm, kl = (value / count for value in summed(self.accelerator, parts.tolist()))
        finite = math.isfinite(total) and math.isfinite(norm)
        if finite:
            self._update()
        self.optimizer.zero_grad(set_to_none=True)
        self._advance(step, finite=finite)
        return StepResult(
            step=step,
            tokens=self.progress.tokens,
            loss=total,
            lm=lm if self._weight < 1 else None,
            kl=kl if self._weight > 0 else None,
            learning_rate=rate,
            gradient_norm=norm,
            tokens_per_second=self.tokens_per_step / (time.perf_counter() - began),
            skipped=not finite,
        )

    def _clip(self) -> float:
        """Clip the gradients and return their joint norm before clipping."""
        limit = math.inf if self.recipe.gradient_clipping is None else self.recipe.gradient_clipping
        norm = torch.nn.utils.clip_grad_norm_(self._trained, limit)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def _update(self) -> None:
        """Take the optimizer's step. An expert that received no token gets zero gradients, so that its moments exist from
        the first step on.
        """
        for parameter in self._trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()

    def _advance(self, step: int, *, finite: bool) -> None:
        progress = self.progress
        progress.step = step
        progress.tokens = int(step * self.samples_per_step * self.samples.tokens_per_sample)
        if finite:
            progress.skipped_in_a_row = 0
        else:
            progress.skipped += 1
            progress.skipped_in_a_row += 1

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss of a micro-batch, summed over its tokens; and its parts [loss, lm, kl] without gradient."""
        tensors = self._on_device(batch)
        labels, labelled = tensors.pop("labels"), labelled_positions(batch["labels"])
        with self._precision():
            output = self.model(**model_inputs(_unwrapped(self.model), tensors), use_cache=False).logits
        theirs = None
        if self._weight > 0:
            theirs = teacher_logits(self.teacher, model_inputs(self.teacher, tensors))
        found = self._loss(
            self.model,
            output,
            labels,
            theirs,
            labelled=None if labelled is None else torch.from_numpy(labelled).to(labels.device),
            weight=self._weight,
            z_loss=self.recipe.z_loss,
        )
        if self.teacher is not None:
            sharding.reshard(self.teacher)
        nothing = torch.zeros((), device=labels.device)
        parts = [found.sum, nothing if found.lm is None else found.lm, nothing if found.kl is None else found.kl]
        return found.sum, torch.stack([part.detach().double() for part in parts])

    def _on_device(self, batch: Batch) -> dict[str, Tensor]:
        device = self.accelerator.device
        return {name: torch.from_numpy(np.ascontiguousarray(array)).to(device) for name, array in batch.items()}

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=self._autocast)

    def _loss(
        self,
        model: Any,
        output: Tensor,
        labels: Tensor,
        theirs: Tensor | None = None,
        *,
        labelled: Tensor | None = None,
        **terms: Any,
    ) -> CombinedLoss:
        """The loss of what a model and the teacher returned: logits, or states if their output layers were removed."""
        layer = removed_output_layer(_unwrapped(model))
        their_layer = None if theirs is None else removed_output_layer(self.teacher)
        with self._precision():
            return combined_loss(
                output, labels, theirs, layer=layer, teacher_layer=their_layer, labelled=labelled, **terms
            )

    def evaluate(self, model: Any, batches: Sequence[Batch]) -> float:
        """The mean loss in nats per token over fixed batches, which the processes share, in the precision of training."""
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        was_training = model.training
        model.eval()
        total, count = 0.0, 0.0
        # every process runs the same number of forward passes, because those of a sharded model are collective
        for at in range(0, len(batches), processes):
            tensors = self._on_device(batches[min(at + rank, len(batches) - 1)])
            labels = tensors.pop("labels")
            inputs = model_inputs(_unwrapped(model), tensors)
            with torch.no_grad(), self._precision():
                found = self._loss(model, model(**inputs, use_cache=False).logits, labels)
            if at + rank < len(batches):
                total += float(found.sum)
                count += float(found.count)
        model.train(was_training)
        total, count = summed(self.accelerator, [total, count])
        return total / max(count, 1.0)


def _unwrapped(model: Any) -> Any:
    """The transformers model inside a DDP wrapper."""
    return model.module if hasattr(model, "module") else model
