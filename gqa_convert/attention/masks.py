"""The shapes and meanings of masks.

Shape legend: b batch, H query heads, q queries, k keys. `b|1` is an axis of length b or 1.
"""

import torch
from torch import Tensor

from gqa_convert.errors import OptionError

Shape = tuple[int, int, int, int]
"""(b, H, q, k)"""

Masks = tuple[Tensor | None, Tensor | None]
"""The boolean mask, True where a query sees a key, and the floats to add to the scores, both [b|1,
H|1, q|1, k].
"""


def to_scores(name: str, tensor: Tensor, shape: Shape) -> Tensor:
    """A mask or bias as a view [b|1, H|1, q|1, k].

    Three axes are refused: broadcasting would read [b, q, k] as [H, q, k] whenever b = H. The keys'
    axis is not broadcast: a mask of length 1 there has left out the cached keys.

    Args:
        name: of the argument, for errors.
        tensor: [q|1, k] or [b|1, H|1, q|1, k].
        shape: (b, H, q, k).

    Raises:
        OptionError: the tensor has another shape.
    """
    view = tensor[None, None] if tensor.dim() == 2 else tensor
    fits = view.dim() == 4 and view.shape[3] == shape[3]
    if not fits or any(
        size not in (1, whole) for size, whole in zip(view.shape, shape, strict=True)
    ):
        raise OptionError(
            f"{name} is {list(tensor.shape)}: "
            f"give [queries, keys] or [batch, heads, queries, keys] = {list(shape)}, "
            "where any axis but the keys' may be 1"
        )
    return view


def split_mask(mask: Tensor | None, bias: Tensor | None, shape: Shape) -> Masks:
    """A mask of either type and a bias, as views of the right shape and type.

    Args:
        mask: bool, True where a query sees a key; or float, added to the scores.
        bias: float, added to the scores.
        shape: (b, H, q, k).

    Raises:
        OptionError: a shape or type does not fit.
    """
    if mask is not None:
        mask = to_scores("mask", mask, shape)
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise OptionError(
                f"mask has type {mask.dtype}: give booleans, True where a query sees a key, "
                "or floats that are added to the scores"
            )
    if bias is not None:
        bias = to_scores("bias", bias, shape)
        if not bias.is_floating_point():
            raise OptionError(
                f"bias has type {bias.dtype}: "
                "give floats that are added to the scores, or a boolean mask as mask"
            )
    return combined(mask, bias)


def combined(*masks: Tensor | None) -> Masks:
    """The boolean masks as one that is True where all of them are, and the sum of the float masks;
    None without any.
    """
    mask: Tensor | None = None
    bias: Tensor | None = None
    for each in masks:
        if each is None:
            continue
        if each.dtype == torch.bool:
            mask = each if mask is None else mask & each
        else:
            bias = each if bias is None else bias + each
    return mask, bias
