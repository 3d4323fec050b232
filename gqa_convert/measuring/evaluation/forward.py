"""Runs a forward pass per batch and computes the loss of each token.

Logits are the largest tensors: they are made and processed for some rows at a time where the model allows it. The callers
sum over tokens in float64.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gqa_convert.data.sampler import IGNORED
from gqa_convert.losses.distillation import token_losses
from gqa_convert.losses.output_layer import without_output_layer
from gqa_convert.measuring import StageProgress, no_progress
from gqa_convert.measuring.evaluation.examples import Array, Material

_ROWS, _ROWS_ON_ACCELERATOR = 256, 512
"""Rows whose logits are made at a time: fewer would read the output projection too often."""


class Scored(NamedTuple):
    """A transformers model in evaluation mode, and its material."""

    model: Any
    material: Material


def score(
    scored: Scored,
    batch: int,
    reference: Scored | None = None,
    progress: StageProgress = no_progress,
) -> list[Array]:
    """Score a model: of every token, [n], the cross-entropy in nats, and with a reference KL(reference || model) in nats.

    Args:
        scored: the model.
        batch: examples at a time.
        reference: a model with the same tokens. If the two have logits for different numbers of tokens, the shared
            tokens are compared, and both distributions are conditioned on them.
        progress: called with the number of tokens that are scored, and that of all.
    """
    passes = [_predictions(each, batch) for each in (scored, reference) if each is not None]
    found = []
    done = 0
    with torch.inference_mode():
        for predictions in zip(*passes, strict=True):
            targets, logits = predictions[0]
            others = [each for _, each in predictions[1:]]
            found.append(token_losses(logits, targets, *others)[: len(passes)])
            done += len(targets)
            progress(done, len(scored.material.blocks))
    return [torch.cat(values).cpu().numpy() for values in zip(*found, strict=True)]


def _predictions(scored: Scored, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The tokens to predict, [r], and their logits, [r, V], for some rows at a time; the model's output layer is taken out
    meanwhile.
    """
    model, material = scored
    count = _ROWS if model.device.type == "cpu" else _ROWS_ON_ACCELERATOR
    some, _ = next(material.batches(size))
    with without_output_layer(model, _on_device(model, some)) as layer:
        for inputs, labels in material.batches(size):
            given: dict[str, Any] = _on_device(model, inputs)
            if "encoder_outputs" in given:
                given["encoder_outputs"] = (given["encoder_outputs"],)
            states = model(**given, use_cache=False).logits
            labels = labels.to(states.device)
            is_scored = labels != IGNORED
            parts = zip(labels[is_scored].split(count), states[is_scored].split(count), strict=True)
            for targets, rows in parts:
                yield targets, rows if layer is None else layer.logits(rows)


def _on_device(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs of a batch on the model's device; what its encoder made in the model's type."""
    return {
        name: tensor.to(model.device, model.dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in inputs.items()
    }
