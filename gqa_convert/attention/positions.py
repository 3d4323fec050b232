"""How attention learns of positions: rotary embedding and ALiBi.

Shape legend: b batch, h heads, q queries, k keys, c head width, r rotated part of it.
"""

import math
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
    """Ratio of the longest wavelength to the shortest, or nearly so; `rope_theta` in configs."""
    fraction: float = 1.0
    """Part of the head width that is rotated, from its front; `partial_rotary_factor` in configs."""

    def width(self, head_width: int) -> int:
        """How many entries of a head are rotated.

        Raises:
            OptionError: they cannot be paired.
        """
        width = int(head_width * self.fraction)
        if not 0 < width <= head_width or width % 2:
            raise OptionError(
                f"rotary would turn {width} of {head_width} entries of a head: their number must be even and not zero"
            )
        return width

    def rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Turn every head by its token's position, in float32 at least.

        Args:
            heads: [b, h, q, c].
            positions: integers [b|1, q].

        Returns:
            [b, h, q, c].
        """
        width = self.width(heads.shape[3])
        wide = torch.promote_types(heads.dtype, torch.float32)
        frequencies = self.base ** (-torch.arange(0, width, 2, device=heads.device, dtype=wide) / width)
        angles = (positions.to(wide)[..., None] * frequencies).unsqueeze(1)  # [b|1, 1, q, r / 2]
        cosine, sine = angles.cos(), angles.sin()
        first, second = heads[..., :width].to(wide).chunk(2, dim=-1)
        turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(heads.dtype)
        return turned if width == heads.shape[3] else torch.cat((turned, heads[..., width:]), dim=-1)


def alibi_bias(
    heads: int, queries: int, keys: int, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The bias of ALiBi (Press et al. 2022, *Train Short, Test Long*): minus a head's slope times the distance; 0 for
    later keys.

    The queries are the newest of the keys' tokens. For a number of heads that is no power of two, the slopes are those
    of the next lower power and then every second one of the next higher, as in the authors' code.

    Returns:
        [1, heads, queries, keys].
    """
    lower = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / lower) for i in range(lower)] + [
        2.0 ** (-4.0 * (2 * i + 1) / lower) for i in range(heads - lower)
    ]
    distance = torch.arange(keys, device=device) - torch.arange(keys - queries, keys, device=device)[:, None]
    return (torch.tensor(slopes, device=device, dtype=dtype)[:, None, None] * distance.clamp(max=0).to(dtype))[None]
