"""The steps of training. A step is a pure function of the state before it, and samples and random numbers depend only on
the number of the step. A resumed run therefore computes exactly what an uninterrupted one does.

accelerate's `accumulate` is not used: with FSDP2 it keeps whole gradients on every process (see `sharding`), and it
averages over batches, not over labels.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf, isfinite
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from gqa_convert.data.order import mix
from gqa_convert.data.sampler import IGNORED, Batch
from gqa_convert.data.samples import EvaluationBlocks, Samples
from gqa_convert.losses.distillation import CombinedLoss, combined_loss, labelled_positions
from gqa_convert.losses.output_layer import removed_output_layer
from gqa_convert.processes import rank, started, summed
from gqa_convert.sharding import reshard, unwrapped
from gqa_convert.training.checkpoints import Progress
from gqa_convert.training.metrics import StepMetrics
from gqa_convert.training.models import on_device, teacher_logits
from gqa_convert.training.optimizers import learning_rate
from gqa_convert.training.recipe import Recipe


@dataclass
class Trainer:
    """Takes the optimizer steps of a run.

    Attributes:
        recipe: the settings.
        model: the model or its wrapper for several processes, in training mode.
        optimizer: the optimizer of its trained parameters.
        samples: the training data.
        steps: the number of steps in the whole run.
        teacher: the model to distil from; None for none.
        progress: the progress of the run, which is kept up to date.
    """

    recipe: Recipe
    model: Any
    optimizer: torch.optim.Optimizer
    samples: Samples
    steps: int
    teacher: Any
    progress: Progress

    def __post_init__(self) -> None:
        tokens_per_sample = self.samples.tokens_per_sample
        self.samples_per_step = self.recipe.samples_per_step(tokens_per_sample)
        self.tokens_per_step = self.samples_per_step * tokens_per_sample
        self._weight = self.recipe.distillation_weight or 0.0
        self._trained = [
            parameter for group in self.optimizer.param_groups for parameter in group["params"]
        ]
        self._autocast = self.recipe.precision == "bf16" and not isinstance(self.model, FSDPModule)

    def run(self, stop: Callable[[], bool]) -> Iterator[StepMetrics]:
        """Take the remaining steps one by one. The generator ends early, between two steps, if `stop` returns true on any
        process.
        """
        for step in range(self.progress.step + 1, self.steps + 1):
            began = perf_counter()
            end = step * self.samples_per_step
            batches = self._share(self.samples, range(end - self.samples_per_step, end))
            labels = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)
            count, stops = summed([labels, stop()])
            if stops:
                return
            metrics = self._step(step, batches, max(count, 1.0))
            metrics.tokens_per_second = round(self.tokens_per_step / (perf_counter() - began), 1)
            yield metrics

    def _share(self, samples: Samples | EvaluationBlocks, numbers: range) -> list[Batch]:
        """This process's share of samples, the same number of batches on every process; surplus samples have ignored
        labels.
        """
        size = self.recipe.micro_batch_size
        own = numbers[rank() :: started()]
        batches = [samples.batch(own[at : at + size]) for at in range(0, len(own), size)]
        while len(batches) * size < len(numbers[:: started()]):
            filler = samples.batch(numbers[:1])
            filler["labels"] = np.full_like(filler["labels"], IGNORED)
            batches.append(filler)
        return batches

    def _step(self, step: int, batches: list[Batch], count: float) -> StepMetrics:
        """One optimizer step on a process's batches, which hold `count` labels on all processes together."""
        progress = self.progress
        torch.manual_seed(mix(self.recipe.seed, step, rank()))  # dropout of adapters
        rate = min(
            learning_rate(self.recipe, step, self.steps),
            progress.highest_share * self.recipe.learning_rate,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # read once at the end, so that the GPU is not synchronised in between
        parts = torch.zeros(3, dtype=torch.float64, device=self._trained[0].device)
        for number, batch in enumerate(batches):
            # DDP averages the gradients of all copies in the last backward pass; shards, which ignore this, in each one,
            # because otherwise every process would hold whole gradients
            self.model.require_backward_grad_sync = number == len(batches) - 1
            found = self.loss(self.model, batch, self._weight, self.recipe.z_loss)
            # turns the mean over processes, which DDP and FSDP compute, into the sum over all tokens divided by their
            # number
            (found.sum * (started() / count)).backward()
            parts += torch.stack([found.sum, found.lm, found.kl]).detach().double()
        norm = torch.nn.utils.clip_grad_norm_(self._trained, self.recipe.gradient_clipping or inf)
        norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        total, lm, kl = (value / count for value in summed(parts.tolist()))
        finite = isfinite(total) and isfinite(norm)
        if finite:
            for parameter in (
                self._trained
            ):  # one that nothing used too, so that its moments exist from the start
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            self.optimizer.step()
        self.optimizer.zero_grad()
        progress.step = step
        progress.tokens = int(step * self.tokens_per_step)
        progress.skipped += not finite
        progress.skipped_in_a_row = 0 if finite else progress.skipped_in_a_row + 1
        return StepMetrics(
            step=step,
            tokens=progress.tokens,
            loss=total,
            lm=lm if self._weight < 1 else None,
            kl=kl if self._weight > 0 else None,
            learning_rate=rate,
            gradient_norm=norm,
            skipped=not finite,
        )

    def loss(
        self, model: Any, batch: Batch, weight: float = 0.0, z_loss: float = 0.0
    ) -> CombinedLoss:
        """The loss of a batch, summed over its tokens, by what the models return: logits, or states if their output
        layers were removed.
        """
        inputs, labels = on_device(batch, model)
        teacher = teacher_layer = labelled = None
        if (numbers := labelled_positions(batch["labels"])) is not None:
            labelled = torch.from_numpy(numbers).to(labels.device)
        with torch.autocast(labels.device.type, torch.bfloat16, enabled=self._autocast):
            output = model(**inputs, use_cache=False).logits
            if weight:
                teacher = teacher_logits(self.teacher, inputs)
                teacher_layer = removed_output_layer(self.teacher)
            found = combined_loss(
                output,
                labels,
                teacher,
                layer=removed_output_layer(unwrapped(model)),
                teacher_layer=teacher_layer,
                labelled=labelled,
                weight=weight,
                z_loss=z_loss,
            )
        if weight:
            reshard(self.teacher)
        return found

    def evaluate(self, model: Any, blocks: EvaluationBlocks) -> float:
        """The mean loss in nats per token over held-out text, which the processes share, in the precision of training."""
        was_training = model.training
        model.eval()
        total = count = 0.0
        with torch.no_grad():
            for batch in self._share(blocks, range(len(blocks))):
                found = self.loss(model, batch)
                total += float(found.sum)
                count += float(found.count)
        model.train(was_training)
        reshard(model)
        total, count = summed([total, count])
        return total / max(count, 1.0)
