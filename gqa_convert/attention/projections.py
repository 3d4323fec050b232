"""The parameters of grouped-query attention: four projections, and how they come from those of
nn.MultiheadAttention.

Shape legend: b batch, d embed_dim, H query heads, N K/V heads, c head_dim, in: embed_dim, kdim
or vdim.
"""

from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from gqa_convert.errors import GroupsError, NonFiniteError, OptionError


class GroupedProjections(nn.Module):  # type: ignore[misc]  # torch is not followed
    """Projections to H query heads and to N key and value heads, and from the heads back to d
    features.

    Args:
        embed_dim: d, the features of inputs and outputs.
        num_heads: H.
        num_kv_heads: N, a divisor of H; by default H.
        head_dim: c; by default d / H.
        kdim: features of the tokens that keys are projected from; by default d.
        vdim: features of the tokens that values are projected from; by default `kdim`.
        bias: whether the four projections have a bias.
        dropout: probability with which an attention weight is zeroed in training.
        batch_first: inputs and outputs are [b, length, features], otherwise [length, b, features].
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        GroupsError: N does not divide H.
        OptionError: an option is out of range or does not fit another.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
            raise GroupsError(
                f"{num_heads} query heads cannot share {num_kv_heads} K/V heads: "
                f"give a divisor of {num_heads} as num_kv_heads"
            )
        if head_dim is None and embed_dim % num_heads:
            raise OptionError(
                f"embed_dim {embed_dim} is not divisible by {num_heads} heads: "
                "give one that is, or head_dim"
            )
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.dropout, self.batch_first = dropout, batch_first
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = self.kdim if vdim is None else vdim
        if not 0.0 <= dropout < 1.0:
            raise OptionError(f"dropout is {dropout}: give a probability below 1")
        linear = partial(nn.Linear, bias=bias, device=device, dtype=dtype)
        self.q_proj = linear(embed_dim, num_heads * self.head_dim)
        self.k_proj = linear(self.kdim, num_kv_heads * self.head_dim)
        self.v_proj = linear(self.vdim, num_kv_heads * self.head_dim)
        self.out_proj = linear(num_heads * self.head_dim, embed_dim)

    def project(
        self, inputs: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [b, H, q, c], keys and values [b, N, k, c], of inputs that are batch first."""
        return (
            split_heads(self.q_proj(inputs), self.num_heads),
            split_heads(self.k_proj(keys), self.num_kv_heads),
            split_heads(self.v_proj(values), self.num_kv_heads),
        )

    @classmethod
    def from_multihead(
        cls, module: nn.MultiheadAttention, num_kv_heads: int, **options: Any
    ) -> Self:
        """A module with the weights of an nn.MultiheadAttention. With as many K/V heads as
        query heads, it computes the same.

        Args:
            module: the source, which is not changed.
            num_kv_heads: N, a divisor of its heads.
            options: further options of the class, such as `causal`.

        Raises:
            GroupsError: N does not divide the heads.
            OptionError: the module is a subclass, or has `bias_k` or `add_zero_attn`, or an option
                is invalid.
            NonFiniteError: a number to be merged is NaN or Inf.
        """
        weight = module.out_proj.weight
        made = cls(
            module.embed_dim,
            module.num_heads,
            num_kv_heads=num_kv_heads,
            kdim=module.kdim,
            vdim=module.vdim,
            bias=module.in_proj_bias is not None,
            dropout=module.dropout,
            batch_first=module.batch_first,
            device=weight.device,
            dtype=weight.dtype,
            **options,
        )
        if type(module) is not nn.MultiheadAttention:
            raise OptionError(
                f"the module is a {type(module).__name__}, which may compute something else: "
                "give an nn.MultiheadAttention"
            )
        if module.bias_k is not None or module.add_zero_attn:
            raise OptionError(
                "the module appends a key (add_bias_kv or add_zero_attn), "
                "which grouped-query attention does not support: train one without"
            )
        # nn.MultiheadAttention stacks the three projections where their inputs are of one size
        weights = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
        rows = {"weight": weights if weights[0] is not None else module.in_proj_weight.chunk(3)}
        if module.in_proj_bias is not None:
            rows["bias"] = module.in_proj_bias.chunk(3)
        state = {f"out_proj.{kind}": each for kind, each in module.out_proj.state_dict().items()}
        for kind, (query, key, value) in rows.items():
            state[f"q_proj.{kind}"] = query
            state[f"k_proj.{kind}"] = _merge_heads(key, module.num_heads, num_kv_heads)
            state[f"v_proj.{kind}"] = _merge_heads(value, module.num_heads, num_kv_heads)
        made.load_state_dict(state)
        made.requires_grad_(weight.requires_grad)
        made.train(module.training)
        return made


def split_heads(flat: Tensor, heads: int) -> Tensor:
    """[b, length, heads * head_dim] as [b, heads, length, head_dim]."""
    return flat.unflatten(-1, (heads, -1)).transpose(1, 2)


def _merge_heads(rows: Tensor, heads: int, kv_heads: int) -> Tensor:
    """[N * c, in] or [N * c] of [H * c, in] or [H * c]: the mean of each group of H / N
    neighbouring heads (Ainslie et al. 2023, section 2.1).

    The mean is taken in float32 for half precision and in float64 for float32 and float64, then
    rounded once.
    """
    if kv_heads == heads:
        return rows
    if not torch.isfinite(rows).all():
        raise NonFiniteError(
            "the keys' or values' projection holds NaN or Inf, "
            "which would spread to merged heads: repair the weights first"
        )
    split = rows.unflatten(0, (kv_heads, heads // kv_heads, -1))
    wide = torch.float32 if rows.element_size() == 2 else torch.float64
    return split.to(wide).mean(1).to(rows.dtype).flatten(0, 1)
