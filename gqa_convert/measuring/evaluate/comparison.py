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

from gqa_convert.measuring.results.schemas import Difference
from gqa_convert.text.scoring.forward import Scores
from gqa_convert.text.scoring.material import Material

Doubles = npt.NDArray[np.float64]
_LARGEST = 700.0
"""Nats whose exponential is still a finite float."""


@dataclass(frozen=True)
class Mean:
    """A ratio of sums over blocks.

    Attributes:
        value: its value.
        deviations: the contribution of each block to the error, [m]; NaN for blocks in which nothing is scored.
    """

    value: float
    deviations: Doubles

    @property
    def error(self) -> float | None:
        """The standard error of the value, None for a single block."""
        return standard_error(self.deviations)


def standard_error(deviations: Doubles) -> float | None:
    """The standard error of a sum of deviations, one per block; None for fewer than two blocks with scores."""
    known = deviations[~np.isnan(deviations)]
    count = len(known)
    return math.sqrt(count / (count - 1) * float(np.square(known).sum())) if count > 1 else None


def mean(sums: Doubles, sizes: Doubles) -> Mean:
    """The ratio of two sums over blocks: [m] and [m]."""
    value = float(sums.sum() / sizes.sum())
    return Mean(value, np.where((sizes > 0) | (sums != 0), sums - value * sizes, np.nan) / sizes.sum())


@dataclass(frozen=True)
class Measured:
    """A model's scores on its material.

    Attributes:
        name: of the model.
        material: what was scored.
        scores: of the model on the material.
        vocabulary: of its tokenizer, ids by token.
    """

    name: str
    material: Material
    scores: Scores
    vocabulary: dict[str, int]

    def not_finite(self) -> int:
        """The number of tokens whose loss is not finite."""
        return int((~np.isfinite(self.scores.loss)).sum())

    def loss(self) -> Mean | None:
        """The mean loss in nats per token."""
        return self._mean(self.material.scored)

    def bits_per_byte(self) -> Mean | None:
        """Bits per byte of text; None where tokens stand for no bytes."""
        return (
            None
            if self.material.sizes is None or not self.material.byte_count
            else self._mean(self.material.sizes * math.log(2))
        )

    def _mean(self, sizes: npt.NDArray[Any]) -> Mean | None:
        return (
            None if self.not_finite() else mean(self.material.by_block(self.scores.loss), self.material.by_block(sizes))
        )


@dataclass(frozen=True)
class Losses:
    """A model's losses, named as in `ModelScores`; None where a token's loss is not finite."""

    loss: float | None
    loss_standard_error: float | None
    perplexity: float | None
    bits_per_byte: float | None
    bits_per_byte_standard_error: float | None
    tokens: int
    bytes: int | None
    scored_nan: int


@dataclass(frozen=True)
class Distance:
    """A model's distance from the reference, named as in `ModelScores`; None where it is not finite."""

    kl: float | None = None
    kl_standard_error: float | None = None
    top1_agreement: float | None = None


def losses(measured: Measured) -> Losses:
    """A model's losses in nats per token and bits per byte, with standard errors."""
    loss, bits = measured.loss(), measured.bits_per_byte()
    return Losses(
        loss=loss.value if loss else None,
        loss_standard_error=loss.error if loss else None,
        perplexity=math.exp(loss.value) if loss and loss.value < _LARGEST else None,
        bits_per_byte=bits.value if bits else None,
        bits_per_byte_standard_error=bits.error if bits else None,
        tokens=measured.material.tokens,
        bytes=measured.material.byte_count,
        scored_nan=measured.not_finite(),
    )


def incomparable(measured: Measured, other: Measured) -> str | None:
    """The reason why two models' predictions can't be compared token by token, None if they can."""
    theirs = {number: token for token, number in other.vocabulary.items()}
    if any(theirs.get(number, token) != token for token, number in measured.vocabulary.items()):
        return f"its tokenizer is not that of {other.name}"
    if measured.material.fingerprint != other.material.fingerprint:
        return f"its tokens of the text are not those of {other.name}"
    return None


def difference(measured: Measured, other: Measured) -> Difference:
    """How much more a model loses than another on the same text, with paired standard errors.

    Nats per token are compared where both models have the same tokens, bits per byte where they have the same blocks.
    """
    both = None if incomparable(measured, other) else (measured.loss(), other.loss())
    same_blocks = measured.material.block_count == other.material.block_count
    bits = (measured.bits_per_byte(), other.bits_per_byte()) if same_blocks else None
    by_token, by_byte = _paired(both), _paired(bits)
    return Difference(
        to=other.name,
        loss=by_token[0],
        standard_error=by_token[1],
        bits_per_byte=by_byte[0],
        bits_per_byte_standard_error=by_byte[1],
    )


def _paired(both: tuple[Mean | None, Mean | None] | None) -> tuple[float | None, float | None]:
    ours, theirs = both or (None, None)
    if ours is None or theirs is None:
        return None, None
    return ours.value - theirs.value, standard_error(ours.deviations - theirs.deviations)


def distance(measured: Measured) -> Distance:
    """KL(reference || model) in nats per token, and the share of tokens at which both rank the same token first."""
    scores, material = measured.scores, measured.material
    if scores.kl is None or scores.agrees is None or not np.isfinite(scores.kl).all() or measured.not_finite():
        return Distance()
    sizes = material.by_block(material.scored)
    kl = mean(material.by_block(scores.kl), sizes)
    return Distance(kl.value, kl.error, mean(material.by_block(scores.agrees), sizes).value)
