"""A grouped-query attention layer.

Shape legend: b batch, q queries, k keys (those cached, then the new ones), n keys cached, d
embed_dim, H query heads, N groups (key/value heads), c head_dim.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gqa_convert.attention.cache import KVCache
from gqa_convert.attention.core import grouped_query_attention
from gqa_convert.attention.masks import combined, split_mask
from gqa_convert.attention.projections import GroupedProjections, split_heads
from gqa_convert.errors import OptionError


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary position embedding (Su et al. 2021, *RoFormer*) in the half layout of Llama: entry i
    is rotated with entry i + r / 2.
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
                f"rotary would rotate {rotated} of {head_dim} entries of a head: "
                "choose a fraction that gives an even "
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
        cosine = angles.cos()
        sine = angles.sin()
        turning, still = heads.to(wide).tensor_split([rotated], dim=-1)
        first, second = turning.chunk(2, dim=-1)
        parts = first * cosine - second * sine, second * cosine + first * sine, still
        return torch.cat(parts, dim=-1).to(heads.dtype)


class GroupedQueryAttention(GroupedProjections):
    """Attention in which H query heads share N key/value heads: multi-head for N = H, multi-query
    for N = 1.

    Sources: Ainslie et al. 2023 (grouped-query), Shazeer 2019 (multi-query), Vaswani et al. 2017
        (multi-head).

    Args:
        embed_dim: d, the features of inputs and outputs.
        num_heads: H.
        groups: N, a divisor of H; by default H.
        scale: factor of the scores; by default 1 / sqrt(c), and 1.0 for none, as in T5.
        causal: a query sees no later key.
        rotary: rotary position embedding of queries and keys.
        projections: options of `GroupedProjections`: `head_dim`, `kdim`, `vdim`, `bias`, `dropout`,
            `batch_first` (masks are batch first always), `device` and `dtype`.

    Raises:
        GroupsError: N does not divide H.
        OptionError: an option is out of range, or contradicts another.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        groups: int | None = None,
        *,
        scale: float | None = None,
        causal: bool = False,
        rotary: Rotary | None = None,
        **projections: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, groups, **projections)
        self.scale, self.causal, self.rotary = scale, causal, rotary
        if rotary is not None:
            rotary.rotary_dim(self.head_dim)

    def forward(
        self,
        inputs: Tensor,
        memory: Tensor | None = None,
        memory_values: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        bias: Tensor | None = None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Attend from `inputs` to themselves and to the cached tokens, or to `memory`.

        Args:
            inputs: [b, q, d].
            memory: [b, k, kdim], the tokens that cross-attention projects keys from. Left out once
                `cache` holds it.
            memory_values: [b, k, vdim], the tokens that values are projected from; by default
                `memory`.
            mask: [q|1, k] or [b|1, H|1, q|1, k]. Booleans are **True where a query sees a key**;
                floats are added to the scores, as in scaled_dot_product_attention. Three axes, [b,
                q, k] or [H, q, k], are refused: add the fourth. Packed documents are a mask too.
            key_mask: bool or 0 and 1, [b, k]; True where a key is a token and not padding. With a
                cache it covers the cached keys too.
            bias: float, shaped like `mask`; added to the scores (T5's relative positions, ALiBi).
            positions: integers [q] or [b|1, q] for rotary; by default n, n + 1, ...
            cache: keys and values of earlier tokens; new ones are appended. In cross-attention the
                first call fills it from `memory`, and later calls without `memory` read it.

        Returns:
            [b, q, d].

        Raises:
            OptionError: shapes or options do not match, or the cache is in use for another memory.
        """
        if not self.batch_first:
            inputs, memory, memory_values = (
                None if x is None else x.transpose(0, 1) for x in (inputs, memory, memory_values)
            )
        # queries, keys and values of the new tokens
        crossing = memory is not None or (cache is not None and cache.holds_memory)
        cached = 0 if cache is None or crossing else cache.length
        if crossing:
            if self.causal or self.rotary is not None:
                raise OptionError(
                    "a memory, or a cache that holds one, is for cross-attention, "
                    "which has no order of tokens: use a layer without causal and rotary"
                )
            query, key, value = self._of_memory(inputs, memory, memory_values, cache)
        else:
            if memory_values is not None or {self.kdim, self.vdim} != {self.embed_dim}:
                raise OptionError(
                    f"the layer projects keys from a memory [batch, keys, {self.kdim}]: give it"
                )
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
        if cache is not None and not crossing:
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

    def _of_memory(
        self,
        inputs: Tensor,
        memory: Tensor | None,
        memory_values: Tensor | None,
        cache: KVCache | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of inputs, and keys and values of a memory, which a cache keeps."""
        if memory is None and memory_values is not None:
            raise OptionError(
                "memory_values are given without memory: "
                "give both, or neither to read the memory in the cache"
            )
        values = memory if memory_values is None else memory_values
        if memory is None and cache is not None:
            return split_heads(self.q_proj(inputs), self.num_heads), cache.keys, cache.values
        query, key, value = self.project(inputs, memory, values)
        if cache is not None:
            key, value = cache.fill(key, value)
        return query, key, value


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
