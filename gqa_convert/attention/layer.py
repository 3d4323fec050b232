"""A grouped-query attention layer.

Shape legend: b batch, q queries, k keys (those cached, then the new ones), n keys cached, d embed_dim, H query heads, N
groups (key/value heads), c head_dim.
"""

from functools import partial

import torch
from torch import Tensor, nn

from gqa_convert.attention.cache import KVCache
from gqa_convert.attention.core import grouped_query_attention
from gqa_convert.attention.masks import split_mask
from gqa_convert.attention.positions import Rotary
from gqa_convert.errors import GroupsError, OptionError


class GroupedQueryAttention(nn.Module):  # type: ignore[misc]  # torch is not followed
    """Attention in which H query heads share N key/value heads: multi-head for N = H, multi-query for N = 1.

    Sources: Ainslie et al. 2023 (grouped-query), Shazeer 2019 (multi-query), Vaswani et al. 2017 (multi-head).

    Args:
        embed_dim: d, the features of inputs and outputs.
        num_heads: H.
        groups: N, a divisor of H; by default H.
        head_dim: c; by default d / H.
        kdim: features of the memory of cross-attention; by default d.
        bias: whether the projections have biases.
        dropout: probability with which an attention weight is zeroed in training.
        batch_first: inputs and outputs are [b, length, features], otherwise [length, b, features]; masks are batch first
            always.
        scale: factor of the scores; by default 1 / sqrt(c), and 1.0 for none, as in T5.
        causal: a query sees no later key.
        rotary: rotary position embedding of queries and keys.
        device: of the parameters.
        dtype: of the parameters.

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
        head_dim: int | None = None,
        kdim: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        batch_first: bool = True,
        scale: float | None = None,
        causal: bool = False,
        rotary: Rotary | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        groups = num_heads if groups is None else groups
        if num_heads < 1 or groups < 1 or num_heads % groups:
            raise GroupsError(
                f"{num_heads} query heads cannot share {groups} key/value heads: give a divisor of {num_heads} as groups"
            )
        if head_dim is None and embed_dim % num_heads:
            raise OptionError(
                f"embed_dim {embed_dim} is not divisible by {num_heads} heads: give one that is, or head_dim"
            )
        head_dim = embed_dim // num_heads if head_dim is None else head_dim
        kdim = embed_dim if kdim is None else kdim
        for name, value in {"embed_dim": embed_dim, "head_dim": head_dim, "kdim": kdim}.items():
            if value < 1:
                raise OptionError(f"{name} is {value}: give a positive number")
        if not 0.0 <= dropout < 1.0:
            raise OptionError(f"dropout is {dropout}: give a probability below 1")
        self.embed_dim, self.head_dim, self.kdim = embed_dim, head_dim, kdim
        self.num_heads, self.groups = num_heads, groups
        self.dropout, self.batch_first = dropout, batch_first
        self.scale, self.causal, self.rotary = scale, causal, rotary
        if rotary is not None:
            rotary.rotary_dim(head_dim)
        linear = partial(nn.Linear, bias=bias, device=device, dtype=dtype)
        self.q_proj = linear(embed_dim, num_heads * head_dim)
        self.k_proj = linear(kdim, groups * head_dim)
        self.v_proj = linear(kdim, groups * head_dim)
        self.out_proj = linear(num_heads * head_dim, embed_dim)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, groups={self.groups}, head_dim={self.head_dim}, batch_first={self.batch_first}"

    def forward(
        self,
        inputs: Tensor,
        memory: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        documents: Tensor | None = None,
        bias: Tensor | None = None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Attend from `inputs` to themselves and to the cached tokens, or to `memory`.

        Args:
            inputs: [b, q, d].
            memory: [b, k, kdim], the tokens that cross-attention projects keys and values from. May be omitted once
                `cache` holds it.
            mask: [q|1, k] or [b|1, H|1, q|1, k]. Booleans are **True where a query sees a key**; floats are added to
                the scores, as in scaled_dot_product_attention. Three axes, [b, q, k] or [H, q, k], are refused: add the
                fourth.
            key_mask: bool or 0 and 1, [b, k]; True where a key is a token and not padding. With a cache it covers the
                cached keys too.
            documents: integers [b, q]; a token sees only the tokens of its own document. Restart `positions` with each
                document.
            bias: float, shaped like `mask`; added to the scores (T5's relative positions, `alibi_bias`).
            positions: integers [q] or [b|1, q] for rotary; by default n, n + 1, ...
            cache: keys and values of earlier tokens; new ones are appended. In cross-attention the first call fills it
                from `memory` and later calls read it: a memory that is passed again is not looked at.

        Returns:
            [b, q, d].

        Raises:
            OptionError: shapes or options do not match, or the cache holds a memory of another shape.
        """
        if not self.batch_first:
            inputs = inputs.transpose(0, 1)
            memory = None if memory is None else memory.transpose(0, 1)
        crossing = memory is not None or (cache is not None and cache.holds_memory)
        cached = 0 if cache is None or crossing else cache.length
        if crossing:
            if self.causal or self.rotary is not None or documents is not None:
                raise OptionError(
                    "a memory, or a cache that holds one, is for cross-attention, which has no order of tokens: use a layer without "
                    "causal and rotary, and give no documents"
                )
            key, value = self._across(memory, cache)
        else:
            if self.kdim != self.embed_dim:
                raise OptionError(f"the layer projects keys from a memory [batch, keys, {self.kdim}]: give it")
            if documents is not None and (cache is not None or documents.shape != inputs.shape[:2]):
                raise OptionError(
                    f"documents are {list(documents.shape)}: give [batch, queries] = {list(inputs.shape[:2])}, and no cache"
                )
            key, value = self._keys_and_values(inputs)
        query = _split_heads(self.q_proj(inputs), self.num_heads)
        if self.rotary is not None:
            positions = self._positions(inputs, positions, cached)
            query, key = self.rotary.rotate(query, positions), self.rotary.rotate(key, positions)
        elif positions is not None:
            raise OptionError("positions are given, but the layer has no rotary embedding: omit them or set rotary")
        if cache is not None and not crossing:
            key, value = cache.append(key, value)
        mask, bias = split_mask(mask, bias, (*query.shape[:3], key.shape[2]))
        out = grouped_query_attention(
            query,
            key,
            value,
            mask=self._combine(mask, key_mask, documents, key),
            bias=bias,
            causal=self.causal,
            cached=cached if self.causal else None,
            scale=self.scale,
            dropout=self.dropout if self.training else 0.0,
        )
        result = self.out_proj(out.transpose(1, 2).flatten(2))
        return result if self.batch_first else result.transpose(0, 1)

    def _keys_and_values(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [b, N, k, c] of tokens [b, k, kdim]."""
        return _split_heads(self.k_proj(tokens), self.groups), _split_heads(self.v_proj(tokens), self.groups)

    def _across(self, memory: Tensor | None, cache: KVCache | None) -> tuple[Tensor, Tensor]:
        """The keys and values of the memory, which a cache keeps for later calls."""
        if cache is not None and cache.holds_memory:
            held = [cache.keys.shape[0], cache.length]
            if memory is not None and list(memory.shape[:2]) != held:
                raise OptionError(
                    f"the cache holds another memory, of [batch, keys] = {held}, and this one is {list(memory.shape[:2])}: use a fresh "
                    "KVCache for each memory"
                )
            return cache.keys, cache.values
        assert memory is not None
        key, value = self._keys_and_values(memory)
        return (key, value) if cache is None else cache.fill(key, value)

    @staticmethod
    def _positions(inputs: Tensor, positions: Tensor | None, cached: int) -> Tensor:
        """Positions [b|1, q]."""
        batch, queries = inputs.shape[:2]
        if positions is None:
            positions = torch.arange(cached, cached + queries, device=inputs.device)
        if positions.shape not in ((queries,), (1, queries), (batch, queries)):
            raise OptionError(f"positions are {list(positions.shape)}: give [batch, queries] = {[batch, queries]}")
        return positions.reshape(-1, queries)

    @staticmethod
    def _combine(mask: Tensor | None, key_mask: Tensor | None, documents: Tensor | None, key: Tensor) -> Tensor | None:
        """All boolean masks combined into one, [b|1, H|1, q|1, k]."""
        if key_mask is not None:
            if key_mask.is_floating_point() or key_mask.shape != (key.shape[0], key.shape[2]):
                raise OptionError(
                    f"key_mask is {list(key_mask.shape)} of {key_mask.dtype}: give booleans, True where a key is a token, of "
                    f"[batch, keys] = {[key.shape[0], key.shape[2]]}; floats that are added to the scores are a mask"
                )
            known = key_mask.bool()[:, None, None]
            mask = known if mask is None else mask & known
        if documents is not None:
            same = (documents[:, :, None] == documents[:, None])[:, None]
            mask = same if mask is None else mask & same
        return mask


def _split_heads(flat: Tensor, heads: int) -> Tensor:
    """[b, length, heads * head_dim] as [b, heads, length, head_dim]."""
    return flat.unflatten(-1, (heads, -1)).transpose(1, 2)
