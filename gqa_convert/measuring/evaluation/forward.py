"""Runs a forward pass per batch and computes the loss of each token.

Logits are the largest tensors: they are made for some rows at a time where the model allows it, and processed for a few
rows at a time, in float32. The callers sum over tokens in float64.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gqa_convert.losses.output_layer import OutputLayer, without_output_layer
from gqa_convert.text.scoring.material import Batches

_CHUNK = 1 << 20
"""The number of logits processed at a time on a CPU."""
_CHUNK_ON_ACCELERATOR = 1 << 26
_ROWS, _ROWS_ON_ACCELERATOR = 256, 1024
"""Rows whose logits are made at a time: fewer would read the output projection too often."""

Floats = npt.NDArray[np.float32]
Rows = Callable[[Tensor], Tensor]
"""The logits [r, V] of rows [r]."""


@dataclass(frozen=True)
class Scores:
    """The scores of every token, [n] each; 0 for tokens that were not scored.

    Attributes:
        loss: the cross-entropy in nats.
        kl: KL(reference || model) in nats; None without a reference.
        agrees: 1 where the likeliest token is the reference's, else 0; None without a reference.
        reference_loss: the reference's own cross-entropy in nats; None without a reference.
    """

    loss: Floats
    kl: Floats | None = None
    agrees: Floats | None = None
    reference_loss: Floats | None = None

    def arrays(self) -> list[Floats]:
        """The arrays that are not None, in the order of the fields."""
        every = (self.loss, self.kl, self.agrees, self.reference_loss)
        return [array for array in every if array is not None]


def score(
    model: Any,
    batches: Batches,
    count: int,
    *,
    reference: Any = None,
    progress: Callable[[int], None] = lambda scored: None,
) -> Scores:
    """Score tokens with a model.

    Args:
        model: a transformers model in evaluation mode.
        batches: the batches to score.
        count: n, the number of all tokens.
        reference: a model with the same tokens. If the two have logits for different numbers of tokens, the shared
            tokens are compared, and both distributions are conditioned on them.
        progress: called after each batch with the number of tokens that it scored.
    """
    scores = Scores(*(np.zeros(count, np.float32) for _ in range(1 if reference is None else 4)))
    with torch.inference_mode(), ExitStack() as stack:
        first = _tensors(batches[0].inputs)
        models = [model] if reference is None or reference is model else [model, reference]
        layers = [stack.enter_context(without_output_layer(each, _on(each, first))) for each in models]
        for number in range(len(batches)):
            batch = batches[number]
            inputs = _tensors(batch.inputs)
            rows = [_rows(each, layer, inputs) for each, layer in zip(models, layers, strict=True)]
            ours, theirs = rows[0], None if reference is None else rows[-1]
            size = _ROWS if model.device.type == "cpu" else _ROWS_ON_ACCELERATOR
            found = _batch_scores(torch.from_numpy(batch.rows), torch.from_numpy(batch.targets), ours, theirs, size)
            for array, values in zip(scores.arrays(), found, strict=True):
                array[batch.places] = values.cpu().numpy()
            progress(len(batch.places))
    return scores


def _tensors(inputs: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in inputs.items()}


def _on(model: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs on the model's device; features of sound in the model's type."""
    moved = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    return {name: tensor.to(model.dtype) if tensor.is_floating_point() else tensor for name, tensor in moved.items()}


def _rows(model: Any, layer: OutputLayer | None, inputs: Mapping[str, Tensor]) -> Rows:
    """Run a batch; returns the function from indices of its rows, of b * L, to their logits.

    Args:
        model: without its output layer, if that was removed.
        layer: the layer.
        inputs: [b, L] each.
    """
    found: Tensor = model(**_on(model, inputs), use_cache=False).logits.flatten(0, 1)
    if layer is None:
        return lambda rows: found[rows.to(found.device)]
    return lambda rows: layer.logits(found[rows.to(found.device)])


def _batch_scores(rows: Tensor, targets: Tensor, ours: Rows, theirs: Rows | None, size: int) -> list[Tensor]:
    """See `token_scores`.

    Args:
        rows: [r], indices of rows.
        targets: [r], the tokens to predict there.
        ours: the logits of rows.
        theirs: those of the reference.
        size: rows at a time.
    """
    found = []
    for some, wanted in zip(rows.split(size), targets.split(size), strict=True):
        logits = ours(some)
        reference = logits if theirs is ours else None if theirs is None else theirs(some)
        found.append(token_scores(logits, wanted, reference))
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def token_scores(logits: Tensor, targets: Tensor, reference: Tensor | None) -> tuple[Tensor, ...]:
    """Loss, divergence and agreement of predictions, and the loss of the reference's.

    Args:
        logits: [r, V].
        targets: [r], the tokens to predict.
        reference: [r, V'], logits of another model.

    Returns:
        [r] each, float32; the loss alone without a reference.
    """
    targets = targets.to(logits.device)
    shared = logits.shape[-1] if reference is None else min(logits.shape[-1], reference.shape[-1])
    size = max(1, (_CHUNK if logits.device.type == "cpu" else _CHUNK_ON_ACCELERATOR) // logits.shape[-1])
    losses, divergences, agreements, theirs = [], [], [], []
    for start in range(0, len(targets), size):
        span = slice(start, start + size)
        some = logits[span].float()
        ours = some.log_softmax(-1)
        losses.append(-ours.gather(1, targets[span, None])[:, 0])
        if reference is None:
            continue
        if shared < some.shape[-1]:
            ours = some[:, :shared].log_softmax(-1)
        other = reference[span].float().log_softmax(-1)
        theirs.append(-other.gather(1, targets[span, None].to(other.device))[:, 0])
        if shared < other.shape[-1]:
            other = reference[span, :shared].float().log_softmax(-1)
        agreements.append((ours.argmax(-1) == other.argmax(-1)).float())
        share = other.exp()
        # a token with probability 0 contributes nothing, whatever its logarithm
        divergences.append(
            other.sub_(ours).mul_(share).masked_fill_(share == 0, 0.0).sum(-1, dtype=torch.float64).float()
        )
    return tuple(torch.cat(parts) for parts in (losses, divergences, agreements, theirs) if parts)
