"""What the tests of attention share."""

import torch
from torch import Tensor


def numbers(*shape: int) -> Tensor:
    """Normal random numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64)
