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

from gqa_convert.text.labels import IGNORED
from gqa_convert.text.linear_losses import labelled_positions, linear_loss
from gqa_convert.text.loss_terms import CombinedLoss
from gqa_convert.text.losses import combined_loss
from gqa_convert.text.order import mix
from gqa_convert.text.output_layers import removed_output_layer
from gqa_convert.text.samples import Samples
from gqa_convert.training import sharding
from gqa_convert.training.checkpoints import Progress
from gqa_convert.training.distributed import summed
from gqa_convert.training.masks import model_inputs
from gqa_convert.training.prefetching import ReadAhead
from gqa_convert.training.recipe import Recipe
from gqa_convert.training.schedules import learning_rate
from gqa_convert.training.teacher import teacher_logits
from gqa_convert.training.utilisation import flops_per_token, peak

Batch = dict[str, np.ndarray[Any, Any]]
_LONGEST_STREAK = 5
"""The number of consecutive steps without a finite gradient after which the run ends."""


@dataclass(frozen=True, slots=True)
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
    seconds: float
    data_seconds: float
    """The part of `seconds` in which this process waited for text, its own or that of another process."""
    source_losses: tuple[float | None, ...]
    """The loss on the samples of each source; None where the step has none."""
    skipped: bool
    """The loss or a gradient was not finite, and nothing was changed."""
    hopeless: bool
    """Too many consecutive steps were skipped, and the run should end."""


class Trainer:
    """Takes the optimizer steps of a run.

    Args:
        recipe: the settings.
        model: the model from `accelerator.prepare` or `sharding.shard`, in training mode.
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
        self.recipe, self.model, self.optimizer, self.samples, self.accelerator = (
            recipe,
            model,
            optimizer,
            samples,
            accelerator,
        )
        self.steps, self.teacher, self.progress = steps, teacher, progress
        self.problem: Exception | None = None
        self.samples_per_step = recipe.samples_per_step(samples.tokens_per_sample)
        self.tokens_per_step = float(self.samples_per_step * samples.tokens_per_sample)
        self._weight = (
            0.0 if teacher is None else 1.0 if recipe.distillation_weight is None else recipe.distillation_weight
        )
        self._trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._autocast = recipe.precision == "bf16" and not sharding.is_sharded(model)
        self._flops_per_token = _flops_per_token(self._inner(), int(samples.tokens_per_sample))
        self._peak: float | None = peak(accelerator.device)

    def run(self, stop: Callable[[], bool]) -> Iterator[StepResult]:
        """Take the remaining steps one by one. The generator ends early, between two steps, if `stop` returns true or
        reading text fails on any process.
        """
        ahead = ReadAhead(self.micro_batches)
        if self.progress.step < self.steps:
            ahead.ask(self.progress.step + 1)
        for step in range(self.progress.step + 1, self.steps + 1):
            began = time.perf_counter()
            batches, self.problem = ahead.take(stop)
            labels = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches or ())
            ends = float(batches is None or stop())
            count, stops = summed(self.accelerator, [float(labels), ends], patiently=True)
            if stops or batches is None:
                return
            if step < self.steps:
                ahead.ask(step + 1)  # read ahead while this step computes
            yield self._step(step, batches, count, began, time.perf_counter() - began)

    def micro_batches(self, step: int) -> list[Batch]:
        """This process's share of a step's samples, the same number of batches on every process; surplus samples have
        ignored labels.
        """
        processes, size = self.accelerator.num_processes, self.recipe.micro_batch_size
        first = (step - 1) * self.samples_per_step
        most = -(-self.samples_per_step // processes)
        batches = [self.samples.batch(indices) for indices in self._own_samples(step)]
        while len(batches) < -(-most // size):
            filler = self.samples.batch([first])
            filler["labels"] = np.full_like(filler["labels"], IGNORED)
            batches.append(filler)
        return batches

    def _own_samples(self, step: int) -> list[list[int]]:
        """The numbers of this process's samples in a step, by micro-batch."""
        first, size = (step - 1) * self.samples_per_step, self.recipe.micro_batch_size
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        own = list(range(first + rank, first + self.samples_per_step, processes))
        return [own[at : at + size] for at in range(0, len(own), size)]

    def _step(self, step: int, batches: list[Batch], count: float, began: float, waited: float) -> StepResult:
        torch.manual_seed(mix(self.recipe.seed, step, self.accelerator.process_index))  # dropout
        rate = learning_rate(self.recipe, step, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # read once at the end, so that the GPU is not synchronised in between
        device, own = self.accelerator.device, self._own_samples(step)
        parts = torch.zeros(3, dtype=torch.float64, device=device)
        by_source = torch.zeros(2, len(self.samples.names), dtype=torch.float64, device=device)  # losses, labels
        for number, batch in enumerate(batches):
            sharding.set_gradient_sync(self.model, number == len(batches) - 1)
            loss, found, by_sequence = self.losses(batch)
            # turns the mean over processes, which DDP and FSDP compute, into the sum over all tokens divided by their
            # number
            (loss * (self.accelerator.num_processes / max(count, 1.0))).backward()
            parts += found
            if number < len(own) and len(self.samples.names) > 1:
                sources = torch.tensor([self.samples.source_of(index) for index in own[number]], device=device)
                by_source[0].index_add_(0, sources, by_sequence.double())
                by_source[1] += torch.from_numpy(
                    np.bincount(sources.cpu(), (batch["labels"] != IGNORED).sum(axis=1), by_source.shape[1])
                ).to(device)
        norm = self._clip()
        sums = summed(self.accelerator, [*parts.tolist(), *by_source.flatten().tolist()])
        total, lm, kl = (value / max(count, 1.0) for value in sums[:3])
        pairs = zip(*np.split(np.array(sums[3:]), 2), strict=True)
        source_losses = tuple(float(each / labels) if labels else None for each, labels in pairs)
        finite = math.isfinite(total) and math.isfinite(norm)
        if finite:
            for parameter in (
                self._trained
            ):  # of an expert that received no token; zero gradients make its moments exist from the first step on
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._advance(step, finite=finite)
        return StepResult(
            step,
            self.progress.tokens,
            total,
            lm if self._weight < 1 else None,
            kl if self._weight > 0 else None,
            rate,
            norm,
            time.perf_counter() - began,
            waited,
            source_losses,
            not finite,
            self.progress.skipped_in_a_row >= _LONGEST_STREAK,
        )

    def _advance(self, step: int, *, finite: bool) -> None:
        self.progress.step = step
        self.progress.tokens = int(step * self.samples_per_step * self.samples.tokens_per_sample)
        self.progress.skipped += not finite
        self.progress.skipped_in_a_row = 0 if finite else self.progress.skipped_in_a_row + 1

    def _clip(self) -> float:
        """Clip the gradients and return their joint norm before clipping."""
        limit = math.inf if self.recipe.gradient_clipping is None else self.recipe.gradient_clipping
        norm = torch.nn.utils.clip_grad_norm_(self._trained, limit)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of a micro-batch, summed over its tokens; and without gradient its parts [loss, lm, kl], and
        the losses of its samples [b].
        """
        tensors = {
            name: torch.from_numpy(np.ascontiguousarray(array)).to(self.accelerator.device)
            for name, array in batch.items()
        }
        labels, labelled = tensors.pop("labels"), labelled_positions(batch["labels"])
        with self._precision():
            output = self.model(**model_inputs(self._inner(), tensors), use_cache=False).logits
        theirs = None
        if self.teacher is not None and self._weight > 0:
            theirs = teacher_logits(self.teacher, model_inputs(self.teacher, tensors))
        found = self._loss(
            self.model,
            output,
            labels,
            theirs,
            labelled=None if labelled is None else torch.from_numpy(labelled).to(labels.device),
            weight=self._weight,
            temperature=self.recipe.temperature,
            top_k=self.recipe.teacher_top_k,
            z_loss=self.recipe.z_loss,
        )
        if self.teacher is not None:
            sharding.reshard(self.teacher)
        nothing = torch.zeros((), device=labels.device)
        parts = [found.sum, nothing if found.lm is None else found.lm, nothing if found.kl is None else found.kl]
        return found.sum, torch.stack([part.detach().double() for part in parts]), found.by_sequence

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
        if layer is None:
            return combined_loss(output, labels, theirs, overwrite=True, **terms)
        with self._precision():
            their_layer = None if theirs is None else removed_output_layer(self.teacher)
            return linear_loss(output, layer, labels, theirs, their_layer, labelled=labelled, **terms)

    def _inner(self) -> Any:
        return _unwrapped(self.model)

    def utilisation(self, tokens_per_second: float) -> float | None:
        """The MFU at a joint rate of all processes; None if the device or the model is not known."""
        if self._peak is None or self._flops_per_token is None:
            return None
        return round(
            float(tokens_per_second * self._flops_per_token / (self._peak * self.accelerator.num_processes)), 4
        )

    def evaluate(self, model: Any, batches: Sequence[Batch]) -> float:
        """The mean loss in nats per token over fixed batches, which the processes share, in the precision of training."""
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        was_training = model.training
        model.eval()
        total, count = 0.0, 0.0
        # every process runs the same number of forward passes, because those of a sharded model are collective
        for at in range(0, len(batches), processes):
            batch = batches[min(at + rank, len(batches) - 1)]
            tensors = {
                name: torch.from_numpy(np.ascontiguousarray(array)).to(self.accelerator.device)
                for name, array in batch.items()
            }
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


def _flops_per_token(model: Any, length: int) -> float | None:
    """The FLOPs per token in training; None for encoder-decoders, in which a token passes through only a part of the
    model.
    """
    config = model.config
    heads, layers = getattr(config, "num_attention_heads", None), getattr(config, "num_hidden_layers", None)
    if getattr(config, "is_encoder_decoder", False) or not (isinstance(heads, int) and isinstance(layers, int)):
        return None
    attention_size = heads * int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return flops_per_token(sum(parameter.numel() for parameter in model.parameters()), layers, attention_size, length)
