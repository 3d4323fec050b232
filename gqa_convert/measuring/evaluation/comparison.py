"""Means over a text, differences of models on the same text, and their standard errors.

Tokens of a text depend on one another, so standard errors are computed over blocks of it (`Material.blocks`), as for a
ratio of sums: with x_j the sum over block j, s_j its size and R = sum x / sum s, the variance of R is m / (m - 1) * sum
(x_j - R s_j)^2 / (sum s)^2 (Cochran 1977, "Sampling Techniques", section 2.11, for large populations). A difference of
two models is paired: block by block.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.measuring.evaluation.candidates import Candidate
from gqa_convert.measuring.evaluation.examples import Material
from gqa_convert.measuring.evaluation.forward import Scores
from gqa_convert.measuring.results import Difference, ModelScores

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Mean:
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


def mean(sums: Doubles, sizes: Doubles) -> Mean:
    """The ratio of two sums over blocks, [m] and [m]; not defined if the second is 0."""
    if not sizes.any():
        return UNDEFINED
    value = float(sums.sum() / sizes.sum())
    is_scored = (sizes > 0) | (sums != 0)
    return Mean(value, np.where(is_scored, sums - value * sizes, np.nan) / sizes.sum())


@dataclass(frozen=True)
class Measured:
    """A model's scores on its material.

    Attributes:
        candidate: the model.
        dtype: of its computation.
        material: what was scored.
        scores: of the model on the material.
        problem: why its predictions can't be compared with another model's token by token, None if they can.
        word_error_rate: wrong words per word that is said; not defined for text.
        is_key: [n], whether each token is one that the long context makes likelier; None if not asked for.
    """

    candidate: Candidate
    dtype: str
    material: Material
    scores: Scores
    problem: str | None = None
    word_error_rate: Mean = UNDEFINED
    is_key: npt.NDArray[np.bool_] | None = None

    @property
    def not_finite(self) -> int:
        """The number of tokens whose loss is not finite."""
        return int((~np.isfinite(self.scores.loss)).sum())

    def loss(self) -> Mean:
        """The mean loss in nats per token."""
        if self.not_finite:
            return UNDEFINED
        return mean(self.material.by_block(self.scores.loss), self.material.by_block(np.ones(self.material.tokens)))

    def bits_per_byte(self) -> Mean:
        """Bits per byte of text, not defined where tokens stand for no bytes."""
        sizes = self.material.sizes
        if self.not_finite or sizes is None:
            return UNDEFINED
        return mean(self.material.by_block(self.scores.loss), self.material.by_block(sizes * math.log(2)))

    def over_key_tokens(self, values: npt.NDArray[np.float32] | None) -> Mean:
        """The mean of a score over the key tokens; not defined without them."""
        if values is None or self.is_key is None or self.not_finite:
            return UNDEFINED
        return mean(self.material.by_block(values * self.is_key), self.material.by_block(self.is_key))

    def from_reference(self, values: npt.NDArray[np.float32] | None) -> Mean:
        """The mean over tokens of a score that compares them with the reference; not defined without one."""
        kl = self.scores.kl
        if values is None or kl is None or self.not_finite or not np.isfinite(kl).all():
            return UNDEFINED
        return mean(self.material.by_block(values), self.material.by_block(np.ones(self.material.tokens)))


def is_same_vocabulary(tokenizer: Any, other: Any) -> bool:
    """Whether no token means different texts to two tokenizers."""
    theirs = {number: token for token, number in other.get_vocab().items()}
    return all(theirs.get(number, token) == token for token, number in tokenizer.get_vocab().items())


def incomparable(candidate: Candidate, material: Material, other: Measured) -> str | None:
    """The reason why two models' predictions can't be compared token by token, None if they can."""
    same = is_same_vocabulary(candidate.tokenizer, other.candidate.tokenizer)
    if not same or material.fingerprint != other.material.fingerprint:
        return f"its tokens are not those of {other.candidate.name}"
    return None


def difference(measured: Measured, other: Measured) -> Difference:
    """How much more a model loses than another on the same text, with paired standard errors.

    Nats per token are compared where both models have the same tokens; blocks are the same wherever bytes are counted.
    """
    loss = UNDEFINED if measured.problem else measured.loss().minus(other.loss())
    bits = measured.bits_per_byte().minus(other.bits_per_byte())
    words = measured.word_error_rate.minus(other.word_error_rate)
    key = measured.over_key_tokens(measured.scores.loss).minus(other.over_key_tokens(other.scores.loss))
    return Difference(
        to=other.candidate.name,
        loss=loss.value,
        standard_error=loss.error,
        bits_per_byte=bits.value,
        bits_per_byte_standard_error=bits.error,
        word_error_rate=words.value,
        word_error_rate_standard_error=words.error,
        key_loss=key.value,
        key_loss_standard_error=key.error,
    )


def identity(candidate: Candidate, dtype: str) -> dict[str, Any]:
    """The fields of an entry that say which model it is."""
    return {
        "model": candidate.name,
        "revision": candidate.revision,
        "fingerprint": candidate.fingerprint,
        "kv_bytes_per_token": candidate.kv_bytes_per_token,
        "dtype": dtype,
    }


def model_scores(measured: Measured, other: Measured | None = None) -> ModelScores:
    """A model's entry in the results: its losses, and its differences from another model."""
    material, scores = measured.material, measured.scores
    loss, bits, kl = measured.loss(), measured.bits_per_byte(), measured.from_reference(scores.kl)
    words = measured.word_error_rate
    key_loss, key_kl = (measured.over_key_tokens(values) for values in (scores.loss, scores.kl))
    return ModelScores(
        **identity(measured.candidate, measured.dtype),
        loss=loss.value,
        loss_standard_error=loss.error,
        perplexity=math.exp(loss.value) if loss.value is not None and loss.value < 700 else None,
        bits_per_byte=bits.value,
        bits_per_byte_standard_error=bits.error,
        word_error_rate=words.value,
        word_error_rate_standard_error=words.error,
        tokens=material.tokens,
        bytes=material.byte_count,
        scored_nan=measured.not_finite,
        difference=None if other is None else difference(measured, other),
        kl=kl.value,
        kl_standard_error=kl.error,
        top1_agreement=measured.from_reference(scores.agrees).value,
        key_tokens=None if measured.is_key is None else int(measured.is_key.sum()),
        key_loss=key_loss.value,
        key_loss_standard_error=key_loss.error,
        key_kl=key_kl.value,
        key_kl_standard_error=key_kl.error,
        note=_note(measured),
    )


def _note(measured: Measured) -> str | None:
    notes = []
    if measured.problem:
        notes.append(f"not compared token by token, since {measured.problem}")
    if measured.material.note:
        notes.append(measured.material.note)
    return "; ".join(notes) or None
