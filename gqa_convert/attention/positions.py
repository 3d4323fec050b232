"""Rotary position embedding.

Shape legend: b batch, h heads, q queries, c head_dim, r rotary dimensions of a head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gqa_convert.errors import OptionError


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary position embedding (Su et al. 2021, *RoFormer*) in the half layout of Llama: entry i is rotated with entry
    i + r / 2.
    """

    base: float = 10000.0
    """About the ratio of the longest wavelength to the shortest; `rope_theta` in configs."""
    fraction: float = 1.0
    """The share of a head's leading entries that rotate; `partial_rotary_factor` in configs."""

    def rotary_dim(self, head_dim: int) -> int:
        """How many entries of a head rotate.

        Raises:
            OptionError: they cannot be paired.
        """
        rotated = int(head_dim * self.fraction)
        if not 0 < rotated <= head_dim or rotated % 2:
            raise OptionError(
                f"rotary would rotate {rotated} of {head_dim} entries of a head: choose a fraction that gives an even "
                "number above zero"
            )
        return rotated

    def rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Rotate every head by its token's position, in float32 or a wider type.

        Args:
            heads: [b, h, q, c].
            positions: integers [b|1, q].

        Returns:
            [b, h, q, c].
        """
        rotated = self.rotary_dim(heads.shape[3])
        wide = torch.promote_types(heads.dtype, torch.float32)
        frequencies = self.base ** (
            -torch.arange(0, rotated, 2, device=heads.device, dtype=wide) / rotated
        )
        angles = (positions.to(wide)[..., None] * frequencies).unsqueeze(1)  # [b|1, 1, q, r / 2]
        cosine, sine = angles.cos(), angles.sin()
        turning, still = heads.to(wide).tensor_split([rotated], dim=-1)
        first, second = turning.chunk(2, dim=-1)
        parts = first * cosine - second * sine, second * cosine + first * sine, still
        return torch.cat(parts, dim=-1).to(heads.dtype)
