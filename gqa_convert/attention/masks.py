"""The shapes and meanings of masks.

Shape legend: b batch, H query heads, q queries, k keys. `b|1` is an axis of length b or 1.
"""

import torch
from torch import Tensor

from gqa_convert.errors import OptionError


def to_scores(name: str, tensor: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """A mask or bias as a view [b|1, H|1, q|1, k].

    Three axes are refused unless the first has length 1: broadcasting would read [b, q, k] as [H, q, k] whenever b = H.
    The keys' axis is not broadcast: a mask of length 1 there has left out the cached keys.

    Args:
        name: of the argument, for errors.
        tensor: [q|1, k], [1, q|1, k] or [b|1, H|1, q|1, k].
        shape: (b, H, q, k).

    Raises:
        OptionError: the tensor has another shape.
    """
    found, full = list(tensor.shape), list(shape)
    if tensor.dim() == 3 and tensor.shape[0] != 1:
        raise OptionError(
            f"{name} is {found}, and three axes could be [batch, queries, keys] or [heads, queries, keys]: pass {name}[:, None] for one per "
            f"sequence, {name}[None] for one per query head, or {name}.unflatten(0, (batch, heads)) for nn.MultiheadAttention's layout"
        )
    sizes = [1] * (4 - tensor.dim()) + found
    broadcasts = len(sizes) == 4 and all(size in (1, whole) for size, whole in zip(sizes, full, strict=True))
    if tensor.dim() < 2 or not broadcasts or sizes[3] != full[3]:
        raise OptionError(
            f"{name} is {found}: give [queries, keys] or [batch, heads, queries, keys] = {full}, where any axis but the keys' may be 1"
        )
    return tensor[(None,) * (4 - tensor.dim())]


def split_mask(
    mask: Tensor | None, bias: Tensor | None, shape: tuple[int, int, int, int]
) -> tuple[Tensor | None, Tensor | None]:
    """The boolean mask and the floats to add to the scores, both as views [b|1, H|1, q|1, k] of the right type.

    Args:
        mask: bool, True where a query sees a key; or float, added to the scores.
        bias: float, added to the scores.
        shape: (b, H, q, k).

    Raises:
        OptionError: a shape or type does not fit.
    """
    mask = None if mask is None else to_scores("mask", mask, shape)
    bias = None if bias is None else to_scores("bias", bias, shape)
    if bias is not None and not bias.is_floating_point():
        raise OptionError(
            f"bias has type {bias.dtype}: give floats that are added to the scores, or a boolean mask as mask"
        )
    if mask is None or mask.dtype == torch.bool:
        return mask, bias
    if not mask.is_floating_point():
        raise OptionError(
            f"mask has type {mask.dtype}: give booleans, True where a query sees a key, or floats that are added to the scores"
        )
    return None, mask if bias is None else bias + mask
