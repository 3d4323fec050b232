"""Means over a text, differences of models on the same text, and their standard errors.

Tokens of a text depend on one another, so standard errors are computed over blocks of it (`Material.blocks`), as for a
ratio of sums: with x_j the sum over block j, s_j its size and R = sum x / sum s, the variance of R is m / (m - 1) * sum
(x_j - R s_j)^2 / (sum s)^2 (Cochran 1977, "Sampling Techniques", section 2.11, for large populations). A difference of
two models is paired: block by block.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gqa_convert.errors import MissingExtraError
from gqa_convert.measuring.evaluation.examples import Array, Doubles, Material, Normal
from gqa_convert.measuring.results import Difference
from gqa_convert.runtime.json_objects import JsonObject


class Mean(NamedTuple):
    """A ratio of sums over blocks.

    Attributes:
        value: its value, None where it is not defined.
        deviations: the contribution of each block to the error, [m]; NaN for blocks in which nothing is scored.
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
    """The ratio of two sums over blocks, [m] and [m]; not defined if the second is 0, or the first not finite."""
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


def measured(material: Material, loss: Array, kl: Array | None = None) -> Means:
    """All means that are defined: none but that of word errors where a loss is not finite.

    Args:
        material: what was scored.
        loss: the cross-entropy of every token in nats, [n].
        kl: KL(reference || model) in nats, [n]; None without a reference.
    """
    found = {}
    if material.spoken:
        said, heard = zip(*material.spoken, strict=True)
        found["word_error_rate"] = mean(*word_errors(said, heard, material.normal))
    if not np.isfinite(loss).all():
        return found
    losses = material.by_block(loss)
    tokens = material.by_block(np.ones_like(loss))
    found["loss"] = mean(losses, tokens)
    if material.sizes is not None:
        found["bits_per_byte"] = mean(losses, material.by_block(material.sizes * math.log(2)))
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


def word_errors(said: Sequence[str], heard: Sequence[str], normal: Normal) -> Doubles:
    """[2, m], the words of each sound that are wrong, missing or too many (Levenshtein distance), and those that are said.

    Args:
        said: the texts.
        heard: what the model wrote.
        normal: gives both one spelling, so that words alone count.

    Raises:
        MissingExtraError: jiwer is not installed.
    """
    try:
        import jiwer
    except ImportError:
        raise MissingExtraError(
            "word errors need jiwer, which is not installed: pip install 'gqa-convert[audio]'"
        ) from None
    counts = []
    for text, written in zip(map(normal, said), map(normal, heard), strict=True):
        words = len(text.split())
        wrong = len(written.split())
        if words:  # hesitations such as "hmm" are no words
            found = jiwer.process_words(text, written)
            wrong = found.substitutions + found.deletions + found.insertions
        counts.append((wrong, words))
    return np.array(counts, np.float64).T
