"""Ridge regression of a projection towards what its output should have been."""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def refit(gram: Array, product: Array, before: Array, ridge: float = 1e-3) -> Array:
    """The projection W that minimises E|W a - y|^2 + s |W - before|^2, with s the ridge times the mean of the diagonal of E[a a^T].

    Directions that the inputs a never take keep the old weights, so that no input is too poor in rank. A bias is one more column of W,
    with a constant one among the inputs.

    Args:
        gram: E[a a^T], [n, n], or any multiple of it.
        product: E[a y^T], [n, D], the same multiple.
        before: the old weights, [D, n].
        ridge: above zero.

    Returns:
        The new weights, [D, n], float64.
    """
    before = np.asarray(before, np.float64)
    strength = ridge * float(np.mean(np.diag(gram)))
    if strength <= 0:
        return before.copy()
    change = np.linalg.solve(gram + strength * np.eye(len(gram)), product - gram @ before.T)
    return np.asarray(before + change.T)
