"""Sums over calibration text: second moments of inputs, and ridge regression of an output
projection.

The products of a batch are made in float32, and summed over batches in float64.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gqa_convert.merging.attention_heads import Heads
from gqa_convert.merging.factorisation import Array
from gqa_convert.merging.merge_layer import Moments
from gqa_convert.processes import gathered, total

from .attention_calls import AttentionCall, here
from .source_layers import SourceLayer

STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Of a ridge regression, relative to the mean of the Gram matrix's diagonal."""
DAMPING = 0.01
"""Added to the diagonal of a moment, relative to the diagonal's mean."""
_SAMPLED = 512
"""Columns of a projection's output, of more than twice as many, on which strengths are compared:
each strength solves equations for every column.
"""


def product(left: Tensor, right: Tensor) -> Tensor:
    """left^T right, [a, b], of [n, a] and [n, b]."""
    return (left.T @ right).double()


def rows_of(tensor: Tensor, *, constant: bool) -> Tensor:
    """[B, L, d] as [n, d], float32, with a 1 behind each row if `constant` says so, which stands
    for a bias.
    """
    rows = tensor.detach().float().flatten(0, 1)
    return torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1) if constant else rows


def damped_moment(states: Iterable[Tensor]) -> Array:
    """E[x x^T] of inputs x with a 1 behind them, [d + 1, d + 1], with `DAMPING` on its diagonal so
    that it is not singular. The last entry is 1.

    Args:
        states: [B, L, d] of each batch.
    """
    own: Any = 0
    for tensor in states:
        rows = rows_of(tensor, constant=True)
        own += product(rows, rows)
    summed = total(own)
    moment: Tensor = summed / summed[-1, -1]
    diagonal = moment.diagonal()[:-1]
    mean = float(diagonal.mean())
    diagonal += DAMPING * mean if mean > 0 else 1.0
    return merging_array(moment)


def moments_of(calls: Sequence[AttentionCall]) -> Moments:
    """The moments of an attention module's inputs over all batches."""
    queries = damped_moment(call.hidden for call in here(calls))
    if all(gathered(all(call.states is call.hidden for call in calls))):
        return Moments(queries, queries)
    return Moments(queries, damped_moment(call.states for call in here(calls)))


def heads_on(layer: SourceLayer, device: torch.device) -> Heads:
    """The heads of a layer of the source, in float64, in arrays as those of `moments_of`."""
    heads = layer.layout.split_heads(layer.tensors)
    return heads.each(lambda array: merging_array(torch.from_numpy(array).to(device)))


def merging_array(tensor: Tensor) -> Array:
    """A tensor as heads are merged in: one of a GPU stays there; on a CPU numpy's eigenproblems are
    as fast, and are those of a merge without torch.
    """
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


@dataclass(slots=True)
class Regression:
    """Sums for a ridge regression that lets a projection repair the error of its output.

    Attributes:
        biased: whether the projection has a bias.
        gram: [z, z], of the inputs.
        cross: [z, t], of inputs with errors.
        powers: [t], the squares of each column of errors.
    """

    biased: bool
    gram: Any = 0
    cross: Any = 0
    powers: Any = 0

    def add(self, inputs: Tensor, error: Tensor, weights: Tensor) -> None:
        """Add inputs of the projection [B, L, z], what its output lacks [B, L, t], and how much
        each position counts [B, L].
        """
        roots = weights.float().sqrt().flatten()[:, None]
        rows = roots * rows_of(inputs, constant=self.biased)
        wanted = roots * rows_of(error, constant=False)
        self.gram += product(rows, rows)
        self.cross += product(rows, wanted)
        self.powers += wanted.square().sum(0).double()

    def summed(self) -> "Regression":
        """The same of all processes."""
        return Regression(self.biased, total(self.gram), total(self.cross), total(self.powers))

    def sampled(self) -> "Regression":
        """The same of evenly spaced columns of the output, or of all if they are few."""
        step = max(1, len(self.powers) // _SAMPLED)
        return Regression(self.biased, self.gram, self.cross[:, ::step], self.powers[::step])

    @property
    def power(self) -> float:
        """The squared error without a change."""
        return float(self.powers.sum())

    def change(self, strength: float) -> Tensor:
        """The change of the weight [z, t], a last row for the bias, that minimises
        |Z change - error|^2 + strength * mean diagonal of Z^T Z * |change|^2.
        """
        mean = float(self.gram.diagonal()[: len(self.gram) - self.biased].mean())
        matrix = self.gram.clone()
        matrix.diagonal().add_(strength * mean if mean > 0 else 1.0)
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if failed:
            return torch.linalg.solve(matrix, self.cross)
        return torch.cholesky_solve(self.cross, factor)

    def error(self, change: Tensor) -> float:
        """The squared error that remains after a change."""
        return self.power - float((change * (2 * self.cross - self.gram @ change)).sum())


def best_strength(fitted: Regression, validation: Regression) -> tuple[float | None, float]:
    """The strength of a ridge regression of one text that leaves the least error on another text,
    in a sample of columns.

    Args:
        fitted: of the text to fit.
        validation: of the other text.

    Returns:
        One of `STRENGTHS`, and the share of the squared error on the other text that it repairs;
        None and 0 where every strength does harm.
    """
    fitted, validation = fitted.sampled(), validation.sampled()
    best, least = None, validation.power
    for strength in STRENGTHS:
        error = validation.error(fitted.change(strength))
        if error < least:
            best, least = strength, error
    return best, 1 - least / validation.power if best else 0.0
