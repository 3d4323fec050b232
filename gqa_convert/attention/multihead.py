"""Converts weights of nn.MultiheadAttention to those of grouped-query attention.

Shape legend: H heads, N groups, c head_dim, in: embed_dim, kdim or vdim.
"""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from gqa_convert.errors import NonFiniteError, OptionError

Merge = Literal["mean", "first"]


def merged_state(module: nn.MultiheadAttention, groups: int, method: Merge, name: str) -> dict[str, Tensor]:
    """The state dict of a module of this package, from one nn.MultiheadAttention.

    Args:
        module: the source, which is not changed.
        groups: N, a divisor of its heads.
        method: how heads are merged.
        name: of the module, for errors.

    Raises:
        OptionError: the method is unknown, or the module is a subclass of nn.MultiheadAttention, or has `bias_k` or
            `add_zero_attn`.
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
    if method not in get_args(Merge):
        raise OptionError(f"method {method!r} is unknown: choose one of {', '.join(get_args(Merge))}")
    parts = {"bias": module.in_proj_bias, "weight": module.in_proj_weight}
    rows = {kind: part.chunk(3) for kind, part in parts.items() if part is not None}
    if "weight" not in rows:
        rows["weight"] = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    state = {f"out_proj.{kind}": tensor for kind, tensor in module.out_proj.state_dict().items()}
    for kind, (query, key, value) in rows.items():
        state[f"q_proj.{kind}"] = query.detach()
        state[f"k_proj.{kind}"] = _merge_heads(key.detach(), module.num_heads, groups, method)
        state[f"v_proj.{kind}"] = _merge_heads(value.detach(), module.num_heads, groups, method)
    return state


def _merge_heads(rows: Tensor, heads: int, groups: int, method: Merge) -> Tensor:
    """[N * c, in] or [N * c] of [H * c, in] or [H * c]: one head per group of H / N neighbouring heads, their mean or the
    first of them (Ainslie et al. 2023, section 2.1).

    The mean is taken in float32 for half precision and in float64 for float32 and float64, then rounded once.
    """
    if groups == heads:
        return rows
    if not torch.isfinite(rows).all():
        raise NonFiniteError(
            "the keys' or values' projection holds NaN or Inf, which would spread to merged heads: repair the weights first"
        )
    split = rows.unflatten(0, (groups, heads // groups, -1))
    wide = torch.float32 if rows.element_size() == 2 else torch.float64
    merged = split[:, 0] if method == "first" else split.to(wide).mean(1).to(rows.dtype)
    return merged.flatten(0, 1)
