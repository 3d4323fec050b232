"""Sums over calibration text, in float64: second moments of inputs, and ridge regression of an output projection."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gqa_convert.conversion.fit.attention_calls import AttentionCall
from gqa_convert.merging.attention_heads import Heads
from gqa_convert.merging.merge_layer import Moments

STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Of a ridge regression, relative to the mean of the Gram matrix's diagonal."""
MOST_DOUBLE_COLUMNS = 1024
"""Products of up to this many columns are made in float64; those of more in float32, and summed in float64."""
DAMPING = 0.01
"""Added to the diagonal of a moment, relative to the diagonal's mean."""

_ALL = slice(None)
_SAMPLED = 512
"""Columns of a projection's output, of more than twice as many, on which strengths are compared: each strength solves
equations for every column.
"""


def product(left: Tensor, right: Tensor) -> Tensor:
    """left^T right in float64, [a, b], of [n, a] and [n, b]."""
    if left.shape[1] <= MOST_DOUBLE_COLUMNS:
        return left.double().T @ right.double()
    return (left.float().T @ right.float()).double()


def gram(rows: Tensor) -> Tensor:
    """rows^T rows in float64, [z, z], of [n, z]. Wide ones are computed above the diagonal, in blocks, and mirrored."""
    size = rows.shape[1]
    if size <= MOST_DOUBLE_COLUMNS:
        return product(rows, rows)
    rows, found = rows.float(), torch.empty(size, size, dtype=torch.float64, device=rows.device)
    for start in range(0, size, MOST_DOUBLE_COLUMNS):
        block = slice(start, start + MOST_DOUBLE_COLUMNS)
        part = rows[:, block].T @ rows[:, start:]
        found[block, start:] = part
        found[start:, block] = part.T
    return found


class Moment:
    """E[x x^T] of inputs x with a 1 behind them, which stands for the bias.

    Args:
        inputs: their number.
    """

    def __init__(self, inputs: int) -> None:
        self._inputs, self._count = inputs, 0
        self._total: Any = 0

    def add(self, states: Tensor, counted: Tensor | None) -> None:
        """Add the states [B, L, inputs]; `counted` [B, L] leaves padding out."""
        rows = _rows(states, counted)
        self._total += gram(torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1))
        self._count += len(rows)

    def damped(self) -> npt.NDArray[np.float64]:
        """The moment [inputs + 1, inputs + 1], with `DAMPING` on its diagonal so that it is not singular. The last
        entry stays 1.
        """
        if not self._count:
            return np.eye(self._inputs + 1)
        found = (self._total / self._count).cpu().numpy()
        mean = float(np.mean(np.diag(found)[:-1]))
        found[np.diag_indices(self._inputs)] += DAMPING * mean if mean > 0 else 1.0
        return np.asarray(found)


def moments_of(calls: Iterable[AttentionCall], heads: Heads) -> Moments:
    """The moments of an attention module's inputs over all batches.

    Args:
        calls: of the module, one for each batch.
        heads: of the source's layer, for the number of inputs of its projections.
    """
    of_queries, of_keys = Moment(heads.queries.shape[-1] - 1), Moment(heads.keys.shape[-1] - 1)
    crosses = False
    for call in calls:
        of_queries.add(call.hidden, call.counted)
        if call.states is not call.hidden:
            crosses = True
            of_keys.add(call.states, call.states_counted)
    queries = of_queries.damped()
    return Moments(queries, of_keys.damped() if crosses else queries)


class Regression:
    """Sums for a ridge regression that lets a projection repair what its output misses.

    Args:
        biased: whether the projection has a bias.
    """

    def __init__(self, *, biased: bool) -> None:
        self.biased = biased
        self._gram: Any = 0
        """[z, z], of the inputs."""
        self._cross: Any = 0
        """[z, t], of inputs with what is missed."""
        self._power: Any = 0
        """[t], the squares of each column of what is missed."""

    def add(self, inputs: Tensor, missed: Tensor, counted: Tensor | None) -> None:
        """Add inputs of the projection [B, L, z] and what its output misses [B, L, t]; `counted` [B, L] leaves padding
        out.
        """
        rows, wanted = _rows(inputs, counted), _rows(missed, counted)
        if self.biased:
            rows = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
        self._gram += gram(rows)
        self._cross += product(rows, wanted)
        self._power += wanted.double().square().sum(0)

    def sample(self) -> slice:
        """Evenly spaced columns, or all if they are few."""
        return slice(None, None, max(1, len(self._power) // _SAMPLED))

    def change(self, strength: float, columns: slice = _ALL) -> Tensor:
        """The change of the weight [z, t], a last row for the bias, that minimises |Z change - missed|^2 +
        strength * mean diagonal of Z^T Z * |change|^2.

        Args:
            strength: of the ridge.
            columns: the columns to compute.
        """
        cross = self._cross[:, columns]
        mean = float(self._gram.diagonal()[: len(self._gram) - self.biased].mean())
        matrix = self._gram.clone()
        matrix.diagonal().add_(strength * mean if mean > 0 else 1.0)
        factor, failed = torch.linalg.cholesky_ex(matrix)
        return torch.linalg.solve(matrix, cross) if failed else torch.cholesky_solve(cross, factor)

    def error(self, change: Tensor | None, columns: slice = _ALL) -> float:
        """The squared error that remains after a change; None for no change.

        Args:
            change: of these columns.
            columns: the columns that count.
        """
        whole = float(self._power[columns].sum())
        if change is None:
            return whole
        return whole - float((change * (2 * self._cross[:, columns] - self._gram @ change)).sum())


def _rows(tensor: Tensor, counted: Tensor | None) -> Tensor:
    """The rows of [B, L, d] that count, [n, d]."""
    rows = tensor.detach().flatten(0, 1)
    return rows if counted is None else rows[counted.flatten()]


def best_change(fitted: Regression, judged: Regression) -> Tensor | None:
    """The ridge regression of one text with the strength that leaves the least error on another text.

    Args:
        fitted: of the text to fit.
        judged: of the text to judge by.

    Returns:
        The change of the weight [z, t]; None where every strength in `STRENGTHS` does harm.
    """
    columns = fitted.sample()
    errors = {
        strength: judged.error(None if strength is None else fitted.change(strength, columns), columns)
        for strength in (None, *STRENGTHS)
    }
    best = min(errors, key=errors.__getitem__)
    return None if best is None else fitted.change(best)
