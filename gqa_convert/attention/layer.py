"""A grouped-query attention layer.

Shape legend: b batch, q queries, k keys (those cached, then the new ones), n keys cached, d
embed_dim, H query heads, N K/V heads, c head_dim.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gqa_convert.errors import OptionError

from .cache import KVCache
from .core import grouped_query_attention
from .masks import combined, split_mask
from .projections import GroupedProjections


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary position embedding (Su et al. 2021, *RoFormer*) in the half layout of Llama: entry i
    is rotated with entry i + c / 2.
    """

    base: float = 10000.0
    """About the ratio of the longest wavelength to the shortest; `rope_theta` in configs."""

    def rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Rotate every head by its token's position, in float32 or a wider type.

        Args:
            heads: [b, h, q, c].
            positions: integers [b|1, q].

        Returns:
            [b, h, q, c].
        """
        head_dim = heads.shape[3]
        wide = torch.promote_types(heads.dtype, torch.float32)
        frequencies = self.base ** (
            -torch.arange(0, head_dim, 2, device=heads.device, dtype=wide) / head_dim
        )
        angles = (positions.to(wide)[..., None] * frequencies).unsqueeze(1)  # [b|1, 1, q, c / 2]
        cosine = angles.cos()
        sine = angles.sin()
        first, second = heads.to(wide).chunk(2, dim=-1)
        turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
        return turned.to(heads.dtype)


class GroupedQueryAttention(GroupedProjections):
    """Attention in which H query heads share N key/value heads: multi-head for N = H, multi-query
    for N = 1.

    Sources: Ainslie et al. 2023 (grouped-query), Shazeer 2019 (multi-query), Vaswani et al. 2017
        (multi-head).

    Args:
        embed_dim: d, the features of inputs and outputs.
        num_heads: H.
        num_kv_heads: N, a divisor of H; by default H.
        scale: factor of the scores; by default 1 / sqrt(c), and 1.0 for none, as in T5.
        causal: a query sees no later key.
        rotary: rotary position embedding of queries and keys.
        projections: options of `GroupedProjections`: `head_dim`, `bias`, `dropout`, `batch_first`
            (masks are batch first always), `device` and `dtype`.

    Raises:
        GroupsError: N does not divide H.
        OptionError: an option is out of range, or contradicts another.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        scale: float | None = None,
        causal: bool = False,
        rotary: Rotary | None = None,
        **projections: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, num_kv_heads, **projections)
        self.scale, self.causal, self.rotary = scale, causal, rotary
        if {self.kdim, self.vdim} != {self.embed_dim}:
            raise OptionError(
                f"keys have {self.kdim} features, values {self.vdim} and queries {self.embed_dim}: "
                "use GroupedMultiheadAttention, which attends to other inputs than its own"
            )
        if rotary is not None and self.head_dim % 2:
            raise OptionError(
                f"rotary pairs the entries of a head, and head_dim is {self.head_dim}: give an "
                "even one"
            )

    def forward(
        self,
        inputs: Tensor,
        *,
        mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        bias: Tensor | None = None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Attend from `inputs` to themselves and to the cached tokens.

        Args:
            inputs: [b, q, d].
            mask: [q|1, k] or [b|1, H|1, q|1, k]. Booleans are **True where a query sees a key**;
                floats are added to the scores, as in scaled_dot_product_attention. Three axes, [b,
                q, k] or [H, q, k], are refused: add the fourth. Packed documents are a mask too.
            key_mask: bool or 0 and 1, [b, k]; True where a key is a token and not padding. With a
                cache it covers the cached keys too.
            bias: float, shaped like `mask`; added to the scores (T5's relative positions, ALiBi).
            positions: integers [q] or [b|1, q] for rotary; by default n, n + 1, ...
            cache: keys and values of earlier tokens; new ones are appended.

        Returns:
            [b, q, d].

        Raises:
            OptionError: shapes or options do not match.
        """
        if not self.batch_first:
            inputs = inputs.transpose(0, 1)
        cached = 0 if cache is None else cache.length
        query, key, value = self.project(inputs, inputs, inputs)
        # their order, before they join the cache
        if self.rotary is not None:
            places = _places(positions, cached, inputs)
            query = self.rotary.rotate(query, places)
            key = self.rotary.rotate(key, places)
        elif positions is not None:
            raise OptionError(
                "positions are given, but the layer has no rotary embedding: "
                "omit them or set rotary"
            )
        if cache is not None:
            key, value = cache.append(key, value)
        # attention, as far as a query may see
        mask, bias = split_mask(mask, bias, (*query.shape[:3], key.shape[2]))
        mask, bias = combined(mask, bias, _seen(key_mask, key))
        order: dict[str, Any] = {"causal": True, "cached": cached} if self.causal else {}
        dropout = self.dropout if self.training else 0.0
        out = grouped_query_attention(
            query, key, value, mask=mask, bias=bias, scale=self.scale, dropout=dropout, **order
        )
        result = self.out_proj(out.transpose(1, 2).flatten(2))
        return result if self.batch_first else result.transpose(0, 1)


def _places(positions: Tensor | None, cached: int, inputs: Tensor) -> Tensor:
    """Positions [b|1, q] of inputs [b, q, d]; by default those behind the cached tokens."""
    batch, queries = inputs.shape[:2]
    if positions is None:
        positions = torch.arange(cached, cached + queries, device=inputs.device)
    if positions.shape not in ((queries,), (1, queries), (batch, queries)):
        raise OptionError(
            f"positions are {list(positions.shape)}: give [batch, queries] = {[batch, queries]}"
        )
    return positions.reshape(-1, queries)


def _seen(key_mask: Tensor | None, key: Tensor) -> Tensor | None:
    """Where queries see keys, [b, 1, 1, k], by padding."""
    if key_mask is None:
        return None
    batch, _, keys, _ = key.shape
    if key_mask.is_floating_point() or key_mask.shape != (batch, keys):
        raise OptionError(
            f"key_mask is {list(key_mask.shape)} of {key_mask.dtype}: "
            "give booleans, True where a key is a token, of "
            f"[batch, keys] = {[batch, keys]}; floats that are added to the scores are a mask"
        )
    return key_mask.bool()[:, None, None]
