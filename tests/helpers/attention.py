"""What the tests of attention share."""

import torch
from torch import Tensor


def numbers(*shape: int) -> Tensor:
    """Normal random numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64)


def oracle(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    bias: Tensor | float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Attention written out, with repeated heads; rows that see nothing are zeros."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = (
        query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scale is None else scale) + bias
    )
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)
    return weights @ value


def distance_bias(
    heads: int, queries: int, keys: int, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """[1, heads, queries, keys]: minus the distance of a key, times a slope for each head, as in
    ALiBi.
    """
    slopes = 2.0 ** -torch.arange(1, heads + 1, dtype=dtype)
    distances = torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]
    return (slopes[:, None, None] * distances.clamp(max=0))[None]
