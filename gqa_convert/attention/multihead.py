"""Converts weights of nn.MultiheadAttention to those of grouped-query attention.

Shape legend: H heads, N groups, c head_dim, in: embed_dim, kdim or vdim.
"""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from gqa_convert.errors import GroupsError, NonFiniteError, OptionError

Merge = Literal["mean", "first"]


def merge_heads(rows: Tensor, heads: int, groups: int, method: Merge = "mean") -> Tensor:
    """One head per group of H / N neighbouring heads: their mean, or the first of them (Ainslie et al. 2023, section
    2.1).

    The mean is taken in float32 for half precision and in float64 for float32 and float64, then rounded once.

    Args:
        rows: [H * c, in] of a weight, or [H * c] of a bias.
        heads: H.
        groups: N, a divisor of H.
        method: mean or first.

    Returns:
        [N * c, in] or [N * c]; with N = H a copy, bit for bit.

    Raises:
        GroupsError: N does not divide H.
        OptionError: the method is unknown, or the rows cannot be divided into H heads.
        NonFiniteError: a number to be merged is NaN or Inf.
    """
    if groups < 1 or heads < 1 or heads % groups:
        raise GroupsError(
            f"{heads} heads cannot be merged into {groups} groups: the number of groups must divide the heads"
        )
    if method not in get_args(Merge):
        raise OptionError(f"method {method!r} is unknown: choose one of {', '.join(get_args(Merge))}")
    if rows.shape[0] % heads:
        raise OptionError(
            f"{rows.shape[0]} rows are not divisible into {heads} heads: give the source's number of heads"
        )
    if groups == heads:
        return rows.detach().clone()
    if not torch.isfinite(rows).all():
        raise NonFiniteError(
            "the keys' or values' projection holds NaN or Inf, which would spread to merged heads: repair the weights first"
        )
    split = rows.detach().reshape(groups, heads // groups, rows.shape[0] // heads, *rows.shape[1:])
    wide = torch.float32 if rows.element_size() == 2 else torch.float64
    merged = split[:, 0].clone() if method == "first" else split.to(wide).mean(1).to(rows.dtype)
    return merged.flatten(0, 1)


def convert_module_state(
    module: nn.MultiheadAttention, groups: int, method: Merge = "mean", name: str = "the module"
) -> dict[str, Tensor]:
    """The state dict of a module of this package, from one nn.MultiheadAttention.

    Args:
        module: the source, which is not changed.
        groups: N, a divisor of its heads.
        method: how heads are merged.
        name: of the module, for errors.

    Raises:
        GroupsError: N does not divide the heads.
        OptionError: the module is a subclass of nn.MultiheadAttention, or has `bias_k` or `add_zero_attn`.
        NonFiniteError: a number to be merged is NaN or Inf.
    """
    if type(module) is not nn.MultiheadAttention:
        raise OptionError(
            f"{name} is a {type(module).__name__}, which may compute something else: give an nn.MultiheadAttention"
        )
    if module.bias_k is not None or module.add_zero_attn:
        raise OptionError(
            f"{name} appends a key (add_bias_kv or add_zero_attn), which grouped-query attention does not support: train one without"
        )
    if module.in_proj_weight is None:
        weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    else:
        weights = module.in_proj_weight.chunk(3)
    biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    converted = {f"out_proj.{key}": tensor.clone() for key, tensor in module.out_proj.state_dict().items()}
    for projection, weight, bias in zip("qkv", weights, biases, strict=True):
        kept = module.num_heads if projection == "q" else groups
        converted[f"{projection}_proj.weight"] = merge_heads(weight, module.num_heads, kept, method)
        if bias is not None:
            converted[f"{projection}_proj.bias"] = merge_heads(bias, module.num_heads, kept, method)
    return converted
