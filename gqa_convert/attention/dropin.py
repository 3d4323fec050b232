"""Grouped-query attention with the calling convention of nn.MultiheadAttention, for models built
from torch's layers.

Shape legend: b batch, q queries, k keys, d embed_dim, H query heads, N K/V heads, c head_dim.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from gqa_convert.errors import GQAConvertError, OptionError

from .core import grouped_query_attention
from .masks import Masks, Shape, combined
from .projections import GroupedProjections


class _NoPackedWeight:
    """Stands for `in_proj_weight` and keeps torch's layers off their fast path for multi-head
    attention.

    The layers take that path unless an argument overrides torch functions. nn.TransformerEncoder
    decides when it is created, before its attention may be replaced.
    """

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        raise OptionError(
            "grouped-query attention has no in_proj_weight: use q_proj, k_proj and v_proj"
        )


class GroupedMultiheadAttention(GroupedProjections):
    """nn.MultiheadAttention whose query heads share `num_kv_heads` K/V heads. Arguments, masks and
    results are the same.

    It replaces nn.MultiheadAttention in nn.TransformerEncoderLayer, nn.TransformerDecoderLayer and
    models built from them (`convert_module`). `GroupedQueryAttention` has the same parameters, and
    also causal order, rotary embedding and a K/V cache, for self-attention.

    Args:
        embed_dim: d, the features of inputs and outputs.
        num_heads: H, a divisor of d.
        dropout: probability with which an attention weight is zeroed in training.
        bias: whether the four projections have a bias.
        add_bias_kv: not supported.
        add_zero_attn: not supported.
        kdim: features of `key`; by default d.
        vdim: features of `value`; by default d.
        batch_first: inputs and outputs are [b, q, d], otherwise [q, b, d].
        device: of the parameters.
        dtype: of the parameters.
        num_kv_heads: N, a divisor of H; by default H.

    Raises:
        GroupsError: N does not divide H.
        OptionError: an option is out of range or not supported.
    """

    in_proj_weight = _NoPackedWeight()
    # nn.TransformerEncoderLayer and nn.TransformerEncoder read these to decide on a fast path
    in_proj_bias = None
    _qkv_same_embed_dim = False
    bias_k = bias_v = None
    add_zero_attn = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
    ) -> None:
        if add_bias_kv or add_zero_attn:
            raise OptionError(
                "add_bias_kv and add_zero_attn append a key, "
                "which grouped-query attention does not support: leave them False"
            )
        super().__init__(
            embed_dim,
            num_heads,
            num_kv_heads,
            kdim=kdim,
            vdim=embed_dim if vdim is None else vdim,
            bias=bias,
            dropout=dropout,
            batch_first=batch_first,
            device=device,
            dtype=dtype,
        )
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        """Draw weights from the distribution of nn.MultiheadAttention, whatever the number of
        K/V heads.
        """
        packed = 3 if self.kdim == self.vdim == self.embed_dim else 1
        for name, projection in self.named_children():
            if name != "out_proj":  # Glorot and Bengio 2010, of all H heads
                bound = (6 / (projection.in_features + packed * self.embed_dim)) ** 0.5
                nn.init.uniform_(projection.weight, -bound, bound)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from `query` to `key` and `value`, as nn.MultiheadAttention does.

        One thing differs: a query that sees no key gives zeros and weights of zero, never NaN.

        Args:
            query: [b, q, d]; [q, b, d] without `batch_first`; or [q, d] without a batch.
            key: [b, k, kdim], in the layout of `query`.
            value: [b, k, vdim], in the layout of `query`.
            key_padding_mask: [b, k], or [k] without a batch. Booleans are **True where a key is
                hidden**; floats are added to the scores.
            need_weights: return the attention weights. False is faster, as in
                nn.MultiheadAttention.
            attn_mask: [q, k] or [b * H, q, k]. Booleans are **True where a key is hidden**; floats
                are added to the scores.
            average_attn_weights: return the mean of the weights over the heads.
            is_causal: a promise that `attn_mask` is the causal mask. It is then not read, unless
                there is a `key_padding_mask` or weights are returned.

        Returns:
            The outputs in the layout of `query`, and None or the weights: [b, q, k], or [b, H, q,
            k] per head; without b if there is no batch. The weights are those after dropout.

        Raises:
            OptionError: shapes or types do not match, an input is a nested tensor, or `is_causal`
                comes without `attn_mask`.
        """
        batched = query.dim() == 3
        if any(x.is_nested for x in (query, key, value)):
            raise OptionError(
                "an input is a nested tensor, which grouped-query attention does not take: "
                "pad it and give key_padding_mask"
            )
        axes = query.dim(), key.dim(), value.dim()
        if axes not in ((2, 2, 2), (3, 3, 3)):
            raise OptionError(
                f"query, key and value have {axes[0]}, {axes[1]} and {axes[2]} axes: "
                "give all of them 3, or 2 without a batch"
            )
        # all layouts as batch first
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        if is_causal and attn_mask is None:
            raise OptionError(
                "is_causal says that attn_mask is causal, but there is none: "
                "give attn_mask too, as to nn.MultiheadAttention"
            )
        queries, keys, values = self.project(query, key, value)
        masks = _visibility(attn_mask, key_padding_mask, (*queries.shape[:3], keys.shape[2]))
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            out, weights = _attention_and_weights(queries, keys, values, masks, dropout)
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        else:
            order: dict[str, Any] = {"mask": masks[0], "bias": masks[1]}
            if is_causal and key_padding_mask is None:
                order = {"causal": True, "cached": 0}
            out = grouped_query_attention(queries, keys, values, dropout=dropout, **order)
        result = self.out_proj(out.transpose(1, 2).flatten(2))
        if not batched:
            return result.squeeze(0), weights
        return result if self.batch_first else result.transpose(0, 1), weights


def convert_module(model: nn.Module, num_kv_heads: int) -> nn.Module:
    """A copy of a model with GroupedMultiheadAttention in place of every nn.MultiheadAttention, and
    its heads merged into their means.

    Args:
        model: any module, such as nn.TransformerDecoder or nn.Transformer, which is not changed.
        num_kv_heads: N, a divisor of the heads of every attention.

    Returns:
        The copy, which needs further training if N is less than the number of heads.

    Raises:
        GroupsError: N does not divide the heads of an attention.
        OptionError: no attention is found, or one of them cannot be converted.
        NonFiniteError: a number to be merged is NaN or Inf.
    """
    replaced: dict[int, Any] = {}
    for name, part in model.named_modules():
        if isinstance(part, nn.MultiheadAttention):
            try:
                replaced[id(part)] = GroupedMultiheadAttention.from_multihead(part, num_kv_heads)
            except GQAConvertError as error:
                raise type(error)(f"{name or 'the model'}: {error}") from None
    if not replaced:
        raise OptionError(
            f"{type(model).__name__} holds no nn.MultiheadAttention: nothing to convert"
        )
    return copy.deepcopy(model, replaced)


def _visibility(attn_mask: Tensor | None, padding: Tensor | None, shape: Shape) -> Masks:
    """The boolean masks combined into one that is True where a query sees a key, and the sum of the
    float masks; both [b|1, H|1, q|1, k].

    Args:
        attn_mask: as `forward` takes it.
        padding: `key_padding_mask` with the batch.
        shape: (b, H, q, k).
    """
    batch, heads, queries, keys = shape
    whole = [batch * heads, queries, keys]
    if attn_mask is not None:
        if list(attn_mask.shape) not in (whole[1:], whole):
            raise OptionError(
                f"attn_mask is {list(attn_mask.shape)}: "
                f"give [queries, keys] = {whole[1:]} or [batch * heads, queries, keys] = {whole}"
            )
        sizes = (batch, heads) if attn_mask.dim() == 3 else (1, 1)
        attn_mask = _seen("attn_mask", attn_mask).reshape(*sizes, queries, keys)
    if padding is not None:
        if padding.shape != (batch, keys):
            raise OptionError(
                f"key_padding_mask is {list(padding.shape)} (with the batch): "
                f"give [batch, keys] = {[batch, keys]}"
            )
        padding = _seen("key_padding_mask", padding)[:, None, None]
    return combined(attn_mask, padding)


def _seen(name: str, mask: Tensor) -> Tensor:
    """Booleans turned to True where a key is seen; floats as they are."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise OptionError(
            f"{name} has type {mask.dtype}: "
            "give booleans, True where a key is hidden, or floats that are added"
        )
    return ~mask if mask.dtype == torch.bool else mask


def _attention_and_weights(
    query: Tensor, key: Tensor, value: Tensor, masks: Masks, dropout: float
) -> tuple[Tensor, Tensor]:
    """Attention as `grouped_query_attention` computes it, and its weights. Half precision is
    computed in float32, and every weight is in memory at once.

    Args:
        query: [b, H, q, c].
        key: [b, N, k, c].
        value: [b, N, k, c].
        masks: the boolean mask and the bias.
        dropout: probability with which a weight is zeroed.

    Returns:
        The outputs [b, H, q, c], and the weights [b, H, q, k] by which the values were summed. Both
        are zeros for a query that sees no key.
    """
    dtype, (batch, kv_heads, keys, _) = query.dtype, key.shape
    wide = torch.promote_types(dtype, torch.float32)
    query, key, value = (each.to(wide) for each in (query, key, value))
    mask, bias = masks
    # a unit matrix in place of the values is weighted to the weights themselves
    units = torch.eye(keys, dtype=wide, device=key.device).expand(batch, kv_heads, keys, keys)
    weights = grouped_query_attention(query, key, units, mask=mask, bias=bias, dropout=dropout)
    out = weights @ value.repeat_interleave(query.shape[1] // kv_heads, dim=1)
    return out.to(dtype), weights.to(dtype)
