"""Losses of every token by forward passes, their means over a text, differences of models on the
same text, and standard errors.

Logits are the largest tensors: they are made and processed for some rows at a time where the model
allows it.

Tokens of a text depend on one another, so standard errors are computed over blocks of it
(`Material.blocks`), as for a ratio of sums: with x_j the sum over block j, s_j its size and R = sum
x / sum s, the variance of R is m / (m - 1) * sum (x_j - R s_j)^2 / (sum s)^2 (Cochran 1977,
"Sampling Techniques", section 2.11, for large populations). A difference of two models is paired:
block by block.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gqa_convert.data.sampler import IGNORED
from gqa_convert.errors import MissingExtraError
from gqa_convert.losses.distillation import token_losses
from gqa_convert.losses.output_layer import without_output_layer
from gqa_convert.measuring import StageProgress, no_progress
from gqa_convert.measuring.results import Difference
from gqa_convert.runtime.json_objects import JsonObject

from .examples import Array, Doubles, Material, Spelling, Spoken

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
    """Score a model: of every token, [n], the cross-entropy in nats, and with a reference
    KL(reference || model) in nats.

    Args:
        scored: the model.
        batch: examples at a time.
        reference: a model with the same tokens. If the two have logits for different numbers of
            tokens, the shared tokens are compared, and both distributions are conditioned on them.
        progress: called with the number of tokens that are scored, and that of all.
    """
    passes = [_predictions(each, batch) for each in (scored, reference) if each is not None]
    found = []
    done = 0
    with torch.inference_mode():
        for (targets, logits), *others in zip(*passes, strict=True):
            theirs = [each for _, each in others]
            found.append(token_losses(logits, targets, *theirs)[: len(passes)])
            done += len(targets)
            progress(done, len(scored.material.blocks))
    return [torch.cat(values).cpu().numpy() for values in zip(*found, strict=True)]


def _predictions(scored: Scored, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The tokens to predict, [r], and their logits, [r, V], for some rows at a time; the model's
    output layer is taken out meanwhile.
    """
    model, material = scored
    count = _ROWS if model.device.type == "cpu" else _ROWS_ON_ACCELERATOR
    some, _ = next(material.batches(1, model.device))
    with without_output_layer(model, some) as layer:
        for inputs, labels in material.batches(size, model.device):
            if "encoder_outputs" in inputs:
                inputs["encoder_outputs"] = (inputs["encoder_outputs"],)
            states = model(**inputs, use_cache=False).logits
            is_scored = labels != IGNORED
            parts = zip(labels[is_scored].split(count), states[is_scored].split(count), strict=True)
            for targets, rows in parts:
                yield targets, rows if layer is None else layer.logits(rows)


class Mean(NamedTuple):
    """A ratio of sums over blocks.

    Attributes:
        value: its value, None where it is not defined.
        deviations: the contribution of each block to the error, [m]; NaN for blocks in which
            nothing is scored.
    """

    value: float | None
    deviations: Doubles

    @property
    def error(self) -> float | None:
        """The standard error of the value; None for fewer than two blocks with scores."""
        known = self.deviations[~np.isnan(self.deviations)]
        count = len(known)
        return math.sqrt(count / (count - 1) * float(np.square(known).sum())) if count > 1 else None

    def minus(self, other: "Mean") -> "Mean":
        """The paired difference from a mean over the same blocks."""
        if self.value is None or other.value is None:
            return UNDEFINED
        return Mean(self.value - other.value, self.deviations - other.deviations)


UNDEFINED = Mean(None, np.empty(0))
Means = Mapping[str, Mean]
"""Means by the keys of results."""


def mean(sums: Doubles, sizes: Doubles) -> Mean:
    """The ratio of two sums over blocks, [m] and [m]; not defined if the second is 0, or the first
    not finite.
    """
    if not sizes.any() or not np.isfinite(sums).all():
        return UNDEFINED
    value = float(sums.sum() / sizes.sum())
    is_scored = (sizes > 0) | (sums != 0)
    return Mean(value, np.where(is_scored, sums - value * sizes, np.nan) / sizes.sum())


def with_errors(means: Means) -> JsonObject:
    """The keys and values of results: each mean and its standard error."""
    found: JsonObject = {}
    for name, each in means.items():
        found |= {name: each.value, f"{name}_standard_error": each.error}
    return found


def measured(material: Material, loss: Array, kl: Array | None = None) -> dict[str, Mean]:
    """The means over a text; none where a loss is not finite.

    Args:
        material: what was scored.
        loss: the cross-entropy of every token in nats, [n].
        kl: KL(reference || model) in nats, [n]; None without a reference.
    """
    if not np.isfinite(loss).all():
        return {}
    losses = material.by_block(loss)
    tokens = material.by_block(np.ones_like(loss))
    found = {"loss": mean(losses, tokens)}
    if material.sizes.any():
        bits = material.by_block(material.sizes * math.log(2))
        found["bits_per_byte"] = mean(losses, bits)
    if kl is not None:
        found["kl"] = mean(material.by_block(kl), tokens)
    return found


def difference(means: Means, other: Means, name: str) -> Difference:
    """The paired differences from the means of another model on the same tokens.

    Args:
        means: of the model.
        other: of the other one.
        name: of the other one.
    """
    gaps = {key: each.minus(other.get(key, UNDEFINED)) for key, each in means.items()}
    return Difference(to=name, **with_errors(gaps))


def word_errors(spoken: Spoken, spelling: Spelling) -> Doubles:
    """[2, m], the words of each sound that are wrong, missing or too many (Levenshtein distance),
    and those that are said.

    Args:
        spoken: what was said, and what the model wrote.
        spelling: for both, so that words alone count.

    Raises:
        MissingExtraError: rapidfuzz is not installed.
    """
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError:
        raise MissingExtraError(
            "word errors need rapidfuzz, which is not installed: pip install 'gqa-convert[audio]'"
        ) from None
    counts = []
    for said, heard in spoken:
        words = spelling(said).split()
        counts.append((Levenshtein.distance(words, spelling(heard).split()), len(words)))
    return np.array(counts, np.float64).T
