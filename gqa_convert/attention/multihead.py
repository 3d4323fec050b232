"""Converts weights of nn.MultiheadAttention to those of grouped-query attention.

Shape legend: H heads, N groups, c head_dim, in: embed_dim, kdim or vdim.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Literal, get_args

import torch
from torch import Tensor, nn

from gqa_convert.errors import GroupsError, NonFiniteError, OptionError

Merge = Literal["mean", "first"]

_PACKED: Final = ("in_proj_weight", "in_proj_bias")
_SEPARATE: Final = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_OUT: Final = ("out_proj.weight", "out_proj.bias")


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


def convert_attention(
    state: Mapping[str, Tensor], heads: int, groups: int, method: Merge = "mean", name: str = "attention"
) -> dict[str, Tensor]:
    """The state dict of a GroupedQueryAttention or GroupedMultiheadAttention, from that of one nn.MultiheadAttention.

    Args:
        state: `in_proj_weight` or `q_proj_weight`, `k_proj_weight`, `v_proj_weight`; `out_proj.weight`; biases where
            there are any.
        heads: H.
        groups: N, a divisor of H.
        method: how heads are merged.
        name: of the attention, for errors.

    Raises:
        GroupsError: N does not divide H.
        OptionError: tensors are missing or cannot be converted.
        NonFiniteError: a number to be merged is NaN or Inf.
    """
    if unknown := sorted(set(state) - {*_PACKED, *_SEPARATE, *_OUT}):
        raise OptionError(
            f"{name} has {', '.join(unknown)}, which grouped-query attention does not support: convert a layer without"
        )
    packed = state.get("in_proj_weight")
    parts = packed.chunk(3) if packed is not None else [state.get(part) for part in _SEPARATE]
    if any(part is None for part in parts) or "out_proj.weight" not in state:
        raise OptionError(
            f"{name} lacks a projection, found {', '.join(sorted(state)) or 'nothing'}: give the whole state dict"
        )
    converted: dict[str, Tensor] = {}
    biases = state["in_proj_bias"].chunk(3) if "in_proj_bias" in state else None
    for index, projection in enumerate(("q_proj", "k_proj", "v_proj")):
        kept = heads if projection == "q_proj" else groups
        converted[f"{projection}.weight"] = merge_heads(parts[index], heads, kept, method)
        if biases is not None:
            converted[f"{projection}.bias"] = merge_heads(biases[index], heads, kept, method)
    return converted | {key: state[key].detach().clone() for key in _OUT if key in state}


def convert_module_state(
    module: nn.MultiheadAttention, groups: int, method: Merge = "mean", name: str = "the module"
) -> dict[str, Tensor]:
    """`convert_attention` of a module, which shows more than its state dict does.

    Raises:
        GroupsError: N does not divide the heads.
        OptionError: the module is a subclass of nn.MultiheadAttention, or has `bias_k` or `add_zero_attn`.
        NonFiniteError: a number to be merged is NaN or Inf.
    """
    if type(module) is not nn.MultiheadAttention:
        raise OptionError(
            f"{name} is a {type(module).__name__}, which may compute something else: give an nn.MultiheadAttention"
        )
    if module.bias_k is not None or module.bias_v is not None:
        raise OptionError(
            f"{name} appends learned keys (add_bias_kv), which grouped-query attention does not support: train one without"
        )
    if module.add_zero_attn:
        raise OptionError(
            f"{name} appends a key of zeros (add_zero_attn), which grouped-query attention does not support: train one without"
        )
    return convert_attention(module.state_dict(), module.num_heads, groups, method, name)


def convert_state_dict(
    state: Mapping[str, Tensor],
    heads: int,
    groups: int,
    method: Merge = "mean",
    *,
    attentions: Sequence[str] = ("self_attn", "multihead_attn"),
    prefix: str = "",
) -> dict[str, Tensor]:
    """Convert every attention in the state dict of an nn.TransformerDecoder, an nn.TransformerDecoderLayer or a module
    that contains some.

    The result fits the same modules with GroupedMultiheadAttention in place of nn.MultiheadAttention, as
    `convert_module` makes them; all other tensors are returned unchanged. A state dict does not show `add_zero_attn`:
    do not convert an attention that has it.

    Args:
        state: a state dict.
        heads: H, the number of heads of every attention in it.
        groups: N, a divisor of H.
        method: mean or first.
        attentions: names of the attention modules; `("self_attn",)` does not convert cross-attention.
        prefix: convert only modules under it; "decoder." does not convert the encoder of an nn.Transformer, as in the
            paper.

    Raises:
        GroupsError: N does not divide H.
        OptionError: no attention is found, or one of them cannot be converted.
        NonFiniteError: a number to be merged is NaN or Inf.
    """
    found: dict[str, dict[str, Tensor]] = {}
    converted: dict[str, Tensor] = {}
    for key, tensor in state.items():
        path = key.split(".")
        at = (
            next((i for i, part in enumerate(path[:-1]) if part in attentions), None)
            if key.startswith(prefix)
            else None
        )
        if at is None:
            converted[key] = tensor
        else:
            found.setdefault(".".join(path[: at + 1]), {})[".".join(path[at + 1 :])] = tensor
    if not found:
        raise OptionError(
            f"no module named {' or '.join(attentions)} under {prefix!r} in {len(state)} tensors: name the attention modules"
        )
    for name, tensors in found.items():
        converted |= {
            f"{name}.{key}": tensor for key, tensor in convert_attention(tensors, heads, groups, method, name).items()
        }
    return converted
