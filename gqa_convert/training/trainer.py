"""The steps of training. A step is a pure function of the state before it, and samples and random
numbers depend only on the number of the step. A resumed run therefore computes exactly what an
uninterrupted one does.

accelerate's `accumulate` is not used: with FSDP2 it keeps whole gradients on every process (see
`sharding`), and it averages over batches, not over labels.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gqa_convert.data.order import mix
from gqa_convert.data.sampler import IGNORED, Batch
from gqa_convert.data.samples import EvaluationBlocks, Samples
from gqa_convert.losses.distillation import CombinedLoss, combined_loss, labelled_positions
from gqa_convert.losses.output_layer import remove_output_layer, removed_output_layer
from gqa_convert.processes import rank, started, summed, together
from gqa_convert.sharding import is_sharded, reshard, unwrapped, whole

from .checkpoints import Progress
from .metrics import StepMetrics
from .optimizers import share_of_peak
from .recipe import Recipe


@dataclass
class Trainer:
    """Takes the optimizer steps of a run.

    Attributes:
        recipe: the settings.
        model: the model or its wrapper for several processes, in training mode.
        optimizer: the optimizer of its trained parameters.
        samples: the training data.
        progress: the progress of the run, which is kept up to date.
        teacher: the model to distil from; None for none.
        held_out: the text to evaluate on; None for none.
        steps: the number of steps in the whole run.
        tokens_per_step: how many tokens of text a step takes.
    """

    recipe: Recipe
    model: Any
    optimizer: torch.optim.Optimizer
    samples: Samples
    progress: Progress
    teacher: Any = None
    held_out: EvaluationBlocks | None = None

    def __post_init__(self) -> None:
        tokens_per_sample = self.samples.tokens_per_sample
        self.steps = self.recipe.steps(tokens_per_sample)
        self.samples_per_step = self.recipe.samples_per_step(tokens_per_sample)
        self.tokens_per_step = self.samples_per_step * tokens_per_sample
        self._weight = self.recipe.distillation_weight or 0.0
        self._trained = [each for group in self.optimizer.param_groups for each in group["params"]]
        self._autocast = self.recipe.precision == "bf16" and not is_sharded(self.model)

    def run(self, stop: Callable[[], bool]) -> Iterator[StepMetrics]:
        """Take the remaining steps one by one. The generator ends early, between two steps, if
        `stop` returns true on any process.
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
        """This process's share of samples, the same number of batches on every process; surplus
        samples have ignored labels.
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
        """One optimizer step on a process's batches, which hold `count` labels on all processes
        together.
        """
        recipe = self.recipe
        progress = self.progress
        torch.manual_seed(mix(recipe.seed, step, rank()))  # dropout of adapters
        share = share_of_peak(recipe, step, self.steps, progress.warmup_steps)
        rate = recipe.learning_rate * min(share, progress.highest_share)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # read once at the end, so that the GPU is not synchronised in between
        parts = torch.zeros(3, dtype=torch.float64, device=self._trained[0].device)
        for number, batch in enumerate(batches):
            # gradients of copies are averaged in the last backward pass, those of shards in each
            # one, because otherwise every process would hold whole gradients
            is_last = number == len(batches) - 1
            if is_sharded(self.model):
                self.model.set_requires_all_reduce(is_last)
            else:
                self.model.require_backward_grad_sync = is_last
            found = self.loss(self.model, batch, self._weight, recipe.z_loss)
            # turns the mean over processes, which DDP and FSDP compute, into the sum over all
            # tokens divided by their number
            (found.sum * (started() / count)).backward()
            parts += torch.stack([found.sum, found.lm, found.kl]).detach().double()
        norm = torch.nn.utils.clip_grad_norm_(self._trained, recipe.gradient_clipping or inf)
        norm = float(whole(norm))
        total, lm, kl = (value / count for value in summed(parts.tolist()))
        finite = isfinite(total) and isfinite(norm)
        if finite:
            for parameter in self._trained:
                # one that nothing used too, so that its moments exist from the start
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
        """The loss of a batch, summed over its tokens, by what the models return: logits, or states
        if their output layers were removed.
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

    def evaluate(self, model: Any) -> float:
        """The mean loss of a model in nats per token over the held-out text, which the processes
        share, in the precision of training.
        """
        blocks = self.held_out
        assert blocks
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


def on_device(batch: Batch, model: Any) -> tuple[dict[str, Tensor], Tensor]:
    """A batch on a model's device: the inputs of its forward pass, and the labels."""
    device = next(model.parameters()).device
    inputs = {
        name: torch.from_numpy(np.ascontiguousarray(array)).to(device)
        for name, array in batch.items()
    }
    return inputs, inputs.pop("labels")


def remove_output(model: Any, sample: Batch) -> bool:
    """Take the output layer out of a model, so that no batch's logits are held as a whole; returns
    whether that was possible. Every process calls this.

    Args:
        model: the model.
        sample: on which it is tried.
    """
    inputs, _ = on_device(sample, model)
    with together():
        removed = remove_output_layer(model, inputs)
    reshard(model)
    return removed


def teacher_logits(teacher: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """The teacher's logits [b, L, V], or its states [b, L, d] if its output layer was removed.

    Autocasting, which may be active for the student, is disabled: the teacher computes in its own
    dtype.

    Args:
        teacher: the model from `load_teacher`.
        inputs: those of the student's forward pass.
    """
    with torch.no_grad(), torch.autocast(teacher.device.type, enabled=False):
        return teacher(**inputs, use_cache=False).logits
