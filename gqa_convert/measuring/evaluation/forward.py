"""Runs a forward pass per batch and computes the loss of each token.

Logits are the largest tensors: they are made for some rows at a time where the model allows it, and processed for a few
rows at a time, in float32. The callers sum over tokens in float64.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gqa_convert.losses.distillation import token_losses
from gqa_convert.losses.output_layer import OutputLayer, without_output_layer
from gqa_convert.measuring.evaluation.examples import Material

_CHUNK = 1 << 20
"""The number of logits processed at a time on a CPU."""
_CHUNK_ON_ACCELERATOR = 1 << 26
_ROWS, _ROWS_ON_ACCELERATOR = 256, 1024
"""Rows whose logits are made at a time: fewer would read the output projection too often."""

Floats = npt.NDArray[np.float32]


class Scores(NamedTuple):
    """The scores of every token, [n] each.

    Attributes:
        loss: the cross-entropy in nats.
        kl: KL(reference || model) in nats; None without a reference.
        agrees: 1 where the likeliest token is the reference's, else 0; None without a reference.
    """

    loss: Floats
    kl: Floats | None = None
    agrees: Floats | None = None


class Scored(NamedTuple):
    """A transformers model in evaluation mode, and its material."""

    model: Any
    material: Material


def score(
    scored: Scored,
    batch: int,
    *,
    reference: Scored | None = None,
    progress: Callable[[int], None] = lambda scored: None,
) -> Scores:
    """Score tokens with a model.

    Args:
        scored: the model.
        batch: examples at a time.
        reference: a model with the same tokens. If the two have logits for different numbers of tokens, the shared
            tokens are compared, and both distributions are conditioned on them.
        progress: called after each batch with the number of tokens that it scored.
    """
    material = scored.material
    arrays = [np.zeros(material.tokens, np.float32) for _ in range(1 if reference is None else 3)]
    both = [scored] if reference is None else [scored, reference]
    with torch.inference_mode(), ExitStack() as stack:
        order = material.order(batch)
        firsts = [_on(each.model, each.material.batch(order[0]).inputs) for each in both]
        layers = [
            stack.enter_context(without_output_layer(each.model, first))
            for each, first in zip(both, firsts, strict=True)
        ]
        for numbers in order:
            batches = [each.material.batch(numbers) for each in both]
            outputs = [
                _scored_rows(each.model, made.inputs, made.rows) for each, made in zip(both, batches, strict=True)
            ]
            targets, found = batches[0].targets.to(scored.model.device), []
            size = _ROWS if scored.model.device.type == "cpu" else _ROWS_ON_ACCELERATOR
            for first in range(0, len(targets), size):
                part = slice(first, first + size)
                logits = [_logits(output[part], layer) for output, layer in zip(outputs, layers, strict=True)]
                found.append(token_scores(logits[0], targets[part], *logits[1:]))
            for array, values in zip(arrays, zip(*found, strict=True), strict=True):
                array[batches[0].places] = torch.cat(values).cpu().numpy()
            progress(len(targets))
    return Scores(*arrays)


def _on(model: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs on the model's device; what its encoder made in the model's type."""
    moved = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    return {name: tensor.to(model.dtype) if tensor.is_floating_point() else tensor for name, tensor in moved.items()}


def _scored_rows(model: Any, inputs: Mapping[str, Tensor], rows: Tensor) -> Tensor:
    """What a model returns as its logits in the scored rows, [r, V], or [r, d] without its output layer."""
    given: dict[str, Any] = _on(model, inputs)
    if "encoder_outputs" in given:
        given["encoder_outputs"] = (given["encoder_outputs"],)
    found: Tensor = model(**given, use_cache=False).logits
    return found.flatten(0, 1)[rows.to(found.device)]


def _logits(rows: Tensor, layer: OutputLayer | None) -> Tensor:
    return rows if layer is None else layer.logits(rows)


def token_scores(logits: Tensor, targets: Tensor, reference: Tensor | None = None) -> tuple[Tensor, ...]:
    """Loss, divergence and agreement of predictions.

    Args:
        logits: [r, V].
        targets: [r], the tokens to predict.
        reference: [r, V'], logits of another model.

    Returns:
        [r] each, float32; the loss alone without a reference.
    """
    size = max(1, (_CHUNK if logits.device.type == "cpu" else _CHUNK_ON_ACCELERATOR) // logits.shape[-1])
    others = repeat(None) if reference is None else reference.to(logits.device).split(size)
    found: list[tuple[Tensor, ...]] = []
    for some, wanted, other in zip(logits.split(size), targets.split(size), others, strict=False):
        loss, kl = token_losses(some, wanted, other)
        if other is None or kl is None:
            found.append((loss,))
            continue
        shared = min(some.shape[-1], other.shape[-1])
        agrees = some[:, :shared].argmax(-1) == other[:, :shared].argmax(-1)
        found.append((loss, kl, agrees.float()))
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))
