"""Runs a forward pass per batch and computes the loss of each token.

Logits are the largest tensors: they are made and processed for some rows at a time where the model allows it. The callers
sum over tokens in float64.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gqa_convert.losses.distillation import token_losses
from gqa_convert.losses.output_layer import OutputLayer, without_output_layer
from gqa_convert.measuring import StageProgress, no_progress
from gqa_convert.measuring.evaluation.examples import Batch, Material

_ROWS, _ROWS_ON_ACCELERATOR = 256, 512
"""Rows whose logits are made at a time: fewer would read the output projection too often."""

Floats = npt.NDArray[np.float32]


class Scores(NamedTuple):
    """The scores of every token, [n] each.

    Attributes:
        loss: the cross-entropy in nats.
        kl: KL(reference || model) in nats; None without a reference.
    """

    loss: Floats
    kl: Floats | None = None


class Scored(NamedTuple):
    """A transformers model in evaluation mode, and its material."""

    model: Any
    material: Material


def score(
    scored: Scored,
    batch: int,
    reference: Scored | None = None,
    progress: StageProgress = no_progress,
) -> Scores:
    """Score tokens with a model.

    Args:
        scored: the model.
        batch: examples at a time.
        reference: a model with the same tokens. If the two have logits for different numbers of tokens, the shared
            tokens are compared, and both distributions are conditioned on them.
        progress: called after each batch with the number of tokens that are scored, and that of all.
    """
    size = _ROWS if scored.model.device.type == "cpu" else _ROWS_ON_ACCELERATOR
    runs = [_passes(each, batch) for each in (scored, reference) if each is not None]
    found = []
    done = 0
    with torch.inference_mode():
        for passes in zip(*runs, strict=True):
            targets = passes[0].targets
            for first in range(0, len(targets), size):
                rows = slice(first, first + size)
                logits = [each.logits(rows) for each in passes]
                found.append(token_losses(logits[0], targets[rows], *logits[1:])[: len(passes)])
            done += len(targets)
            progress(done, len(scored.material.blocks))
    return Scores(*(torch.cat(values).cpu().numpy() for values in zip(*found, strict=True)))


class _Pass(NamedTuple):
    """What a forward pass gave for a batch: logits [r, V], or the states [r, d] of which an output layer makes them."""

    targets: Tensor
    states: Tensor
    layer: OutputLayer | None

    def logits(self, rows: slice) -> Tensor:
        states = self.states[rows]
        return states if self.layer is None else self.layer.logits(states)


def _passes(scored: Scored, size: int) -> Iterator[_Pass]:
    """The forward passes of a model, whose output layer is taken out meanwhile."""
    model, material = scored
    with without_output_layer(model, _inputs(model, next(material.batches(size)))) as layer:
        for batch in material.batches(size):
            given: dict[str, Any] = _inputs(model, batch)
            if "encoder_outputs" in given:
                given["encoder_outputs"] = (given["encoder_outputs"],)
            states = model(**given, use_cache=False).logits.flatten(0, 1)
            yield _Pass(batch.targets.to(states.device), states[batch.rows.to(states.device)], layer)


def _inputs(model: Any, batch: Batch) -> dict[str, Tensor]:
    """The inputs of a batch on the model's device; what its encoder made in the model's type."""
    inputs = {}
    for name, tensor in batch.inputs.items():
        inputs[name] = tensor.to(model.device, model.dtype if tensor.is_floating_point() else tensor.dtype)
    return inputs
