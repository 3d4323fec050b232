"""A grouped-query attention layer.

Shape legend: b batch, q queries, k keys (those cached, then the new ones), n keys cached, d width, H query heads, N groups (key/value
heads), c head width, e head width of the values.
"""

from collections.abc import Collection
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from gqa_convert.attention.cache import KVCache
from gqa_convert.attention.core import grouped_query_attention
from gqa_convert.attention.multihead import Merge, convert_attention
from gqa_convert.attention.positions import Rotary
from gqa_convert.errors import GroupsError, OptionError

PROJECTIONS: Final = ("q", "k", "v", "out")


class GroupedQueryAttention(nn.Module):  # type: ignore[misc]  # torch is not followed
    """Attention in which H query heads share N key/value heads: multi-head for N = H, multi-query for N = 1.

    Sources: Ainslie et al. 2023 (grouped-query), Shazeer 2019 (multi-query), Vaswani et al. 2017 (multi-head).

    Args:
        width: d, of the inputs and outputs.
        heads: H.
        groups: N, a divisor of H; by default H.
        head_width: c; by default d / H.
        value_head_width: e; by default c.
        key_width: width of what keys are made of, for cross-attention; by default d.
        value_width: width of what values are made of; by default `key_width`.
        bias: True for all four projections, or the names of those with a bias among q, k, v, out.
        fused: one projection [q | k | v] instead of three; the same results.
        scale: factor of the scores; by default 1 / sqrt(c), and 1.0 for none, as in T5.
        causal: a query sees no later key.
        rotary: rotary position embedding of queries and keys.
        dropout: probability with which an attention weight is zeroed in training.
        batch_first: inputs and outputs are [b, q, d]; else [q, b, d]. Masks are batch first always.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        GroupsError: N does not divide H.
        OptionError: an option makes no sense by itself or beside another.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        groups: int | None = None,
        *,
        head_width: int | None = None,
        value_head_width: int | None = None,
        key_width: int | None = None,
        value_width: int | None = None,
        bias: bool | Collection[str] = False,
        fused: bool = False,
        scale: float | None = None,
        causal: bool = False,
        rotary: Rotary | None = None,
        dropout: float = 0.0,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        groups = heads if groups is None else groups
        if heads < 1 or groups < 1 or heads % groups:
            raise GroupsError(f"{heads} query heads cannot share {groups} key/value heads: their number must divide the heads")
        if head_width is None and width % heads:
            raise OptionError(f"a width of {width} is not {heads} heads of one width: give head_width")
        self.width, self.heads, self.groups = width, heads, groups
        self.head_width = width // heads if head_width is None else head_width
        self.value_head_width = self.head_width if value_head_width is None else value_head_width
        self.key_width = width if key_width is None else key_width
        self.value_width = self.key_width if value_width is None else value_width
        self.scale, self.causal, self.rotary, self.dropout, self.batch_first = scale, causal, rotary, dropout, batch_first
        if min(width, self.head_width, self.value_head_width, self.key_width, self.value_width) < 1:
            raise OptionError("a width is less than 1: give positive widths")
        if not 0.0 <= dropout < 1.0:
            raise OptionError(f"dropout is {dropout}: give a probability below 1")
        if rotary is not None:
            rotary.width(self.head_width)
        biased = set(PROJECTIONS if bias is True else bias or ())
        if unknown := biased - set(PROJECTIONS):
            raise OptionError(f"no projection is named {', '.join(sorted(unknown))}: bias takes {', '.join(PROJECTIONS)}")

        def linear(name: str, inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=name in biased, device=device, dtype=dtype)

        self.q_proj = linear("q", width, self._rows[0])
        self.k_proj = linear("k", self.key_width, self._rows[1])
        self.v_proj = linear("v", self.value_width, self._rows[2])
        self.out_proj = linear("out", heads * self.value_head_width, width)
        if fused:
            self.fuse()

    @property
    def _rows(self) -> tuple[int, int, int]:
        """Rows of the projections to queries, keys and values."""
        return self.heads * self.head_width, self.groups * self.head_width, self.groups * self.value_head_width

    @property
    def fused(self) -> bool:
        """Whether there is one projection `qkv_proj` in place of `q_proj`, `k_proj` and `v_proj`."""
        return hasattr(self, "qkv_proj")

    def extra_repr(self) -> str:
        return f"heads={self.heads}, groups={self.groups}, head_width={self.head_width}, causal={self.causal}, rotary={self.rotary}"

    def fuse(self) -> Self:
        """Join the three projections into one, in place: for a fresh layer or before an optimiser is made.

        Raises:
            OptionError: keys or values have another width than queries, or only some of the three have a bias.
        """
        if self.fused:
            return self
        parts = (self.q_proj, self.k_proj, self.v_proj)
        if {self.key_width, self.value_width} != {self.width}:
            raise OptionError(
                f"inputs of widths {self.width}, {self.key_width}, {self.value_width} cannot share a projection: use fused=False"
            )
        if len({part.bias is None for part in parts}) > 1:
            raise OptionError("a fused projection has a bias for all of q, k, v or for none: name all three or use fused=False")
        weight = torch.cat([part.weight.detach() for part in parts])
        joined = nn.Linear(self.width, len(weight), bias=self.q_proj.bias is not None, device=weight.device, dtype=weight.dtype)
        with torch.no_grad():
            joined.weight.copy_(weight)
            if joined.bias is not None:
                joined.bias.copy_(torch.cat([part.bias for part in parts]))
        del self.q_proj, self.k_proj, self.v_proj
        self.qkv_proj = joined
        return self

    def unfuse(self) -> Self:
        """Cut a fused projection into three, in place."""
        if not self.fused:
            return self
        joined = self.qkv_proj
        weights = joined.weight.detach().split(self._rows)
        biases = (None,) * 3 if joined.bias is None else joined.bias.detach().split(self._rows)
        del self.qkv_proj
        for name, weight, bias in zip(("q_proj", "k_proj", "v_proj"), weights, biases, strict=True):
            part = nn.Linear(self.width, len(weight), bias=bias is not None, device=weight.device, dtype=weight.dtype)
            with torch.no_grad():
                part.weight.copy_(weight)
                if bias is not None:
                    part.bias.copy_(bias)
            setattr(self, name, part)
        return self

    def forward(
        self,
        inputs: Tensor,
        memory: Tensor | None = None,
        memory_values: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        documents: Tensor | None = None,
        bias: Tensor | None = None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Attend from `inputs` to themselves and to what is cached, or to `memory`.

        Args:
            inputs: [b, q, d].
            memory: [b, k, key_width], what keys are made of in cross-attention.
            memory_values: [b, k, value_width], what values are made of; by default `memory`.
            mask: bool, broadcastable to [b, H, q, k]; True where a query sees a key.
            key_mask: bool or 0 and 1, [b, k]; True where a key is a token and no padding. With a cache it covers the cached keys too.
            documents: integers [b, q]; a token sees tokens of its own document only. Restart `positions` with each document.
            bias: float, broadcastable to [b, H, q, k]; added to the scores (T5's relative positions, `alibi_bias`).
            positions: integers [q] or [b|1, q] for rotary; by default n, n + 1, ...
            cache: keys and values of earlier tokens; the new ones are appended. In cross-attention it is filled from `memory` once
                and read from then on.

        Returns:
            [b, q, d].

        Raises:
            OptionError: shapes or options do not fit together.
        """
        if not self.batch_first:
            inputs, memory, memory_values = (None if x is None else x.transpose(0, 1) for x in (inputs, memory, memory_values))
        self._check_inputs(inputs, memory, memory_values, documents, cache)
        cached = 0 if cache is None or memory is not None else cache.length
        query, key, value = self._project(inputs, memory, memory_values, cache)
        if self.rotary is not None:
            positions = self._positions(inputs, positions, cached)
            query, key = self.rotary.rotate(query, positions), self.rotary.rotate(key, positions)
        elif positions is not None:
            raise OptionError("positions are given, but the layer has no rotary embedding: leave them out or set rotary")
        if cache is not None:
            key, value = (cache.keys, cache.values) if memory is not None and cache.length else cache.append(key, value)
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

    def _project(self, inputs: Tensor, memory: Tensor | None, memory_values: Tensor | None, cache: KVCache | None) -> list[Tensor]:
        """Queries [b, H, q, c], keys [b, N, k, c] and values [b, N, k, e]; keys and values of a memory that is cached come empty."""
        if self.fused:
            flat = self.qkv_proj(inputs).split(self._rows, dim=-1)
        else:
            source = inputs if memory is None else memory
            values = source if memory_values is None else memory_values
            if memory is not None and cache is not None and cache.length:
                source, values = source[:, :0], values[:, :0]
            flat = (self.q_proj(inputs), self.k_proj(source), self.v_proj(values))
        heads = (self.heads, self.groups, self.groups)
        return [part.unflatten(-1, (count, -1)).transpose(1, 2) for part, count in zip(flat, heads, strict=True)]

    def _check_inputs(
        self, inputs: Tensor, memory: Tensor | None, memory_values: Tensor | None, documents: Tensor | None, cache: KVCache | None
    ) -> None:
        if inputs.dim() != 3 or inputs.shape[2] != self.width:
            raise OptionError(f"inputs are {list(inputs.shape)}: give [batch, queries, {self.width}]")
        if memory is None:
            if memory_values is not None or {self.key_width, self.value_width} != {self.width}:
                raise OptionError(f"keys are made of a memory [batch, keys, {self.key_width}]: give it")
            if documents is not None and (cache is not None or documents.shape != inputs.shape[:2]):
                raise OptionError(f"documents are {list(documents.shape)}: give [batch, queries] = {list(inputs.shape[:2])}, and no cache")
            return
        if self.causal or self.rotary is not None or self.fused or documents is not None:
            raise OptionError("attention to a memory knows no order: use a layer without causal, rotary and fused, and give no documents")
        values = memory if memory_values is None else memory_values
        for name, given, width in (("memory", memory, self.key_width), ("memory_values", values, self.value_width)):
            if given.dim() != 3 or given.shape != (inputs.shape[0], memory.shape[1], width):
                raise OptionError(f"{name} is {list(given.shape)}: give {[inputs.shape[0], memory.shape[1], width]}")
        if cache is not None and cache.length not in (0, memory.shape[1]):
            raise OptionError(f"the cache holds {cache.length} keys of another memory, this one has {memory.shape[1]}: use a fresh cache")

    @staticmethod
    def _positions(inputs: Tensor, positions: Tensor | None, cached: int) -> Tensor:
        if positions is None:
            return torch.arange(cached, cached + inputs.shape[1], device=inputs.device)[None]
        positions = positions[None] if positions.dim() == 1 else positions
        if positions.dim() != 2 or positions.shape[0] not in (1, inputs.shape[0]) or positions.shape[1] != inputs.shape[1]:
            raise OptionError(f"positions are {list(positions.shape)}: give [batch, queries] = {list(inputs.shape[:2])}")
        return positions

    @staticmethod
    def _combine(mask: Tensor | None, key_mask: Tensor | None, documents: Tensor | None, key: Tensor) -> Tensor | None:
        """All boolean masks as one."""
        if key_mask is not None:
            if key_mask.is_floating_point() or key_mask.shape != (key.shape[0], key.shape[2]):
                raise OptionError(
                    f"key_mask is {list(key_mask.shape)} of {key_mask.dtype}: give booleans [batch, keys] = {[key.shape[0], key.shape[2]]}"
                )
            known = key_mask.bool()[:, None, None]
            mask = known if mask is None else mask & known
        if documents is not None:
            same = (documents[:, :, None] == documents[:, None])[:, None]
            mask = same if mask is None else mask & same
        return mask

    @classmethod
    def from_multihead(cls, module: nn.MultiheadAttention, groups: int, method: Merge = "mean", **options: Any) -> Self:
        """The layer that takes over from an nn.MultiheadAttention: with as many groups as heads, its exact equal.

        The masks of nn.MultiheadAttention mean the opposite: pass `~attn_mask` as `mask` and `~key_padding_mask` as `key_mask`.

        Args:
            module: the source; it is left as it is.
            groups: N, a divisor of its heads.
            method: how heads are merged: their mean, or the first of each group.
            options: further options of the layer: `causal`, `rotary`, `scale`.

        Raises:
            GroupsError: N does not divide the heads.
            OptionError: the module has `bias_k` or `add_zero_attn`, or an option makes no sense.
            NonFiniteError: a number to be merged is NaN or Inf.
        """
        if module.bias_k is not None or module.bias_v is not None:
            raise OptionError("the module appends learned keys (add_bias_kv), which grouped-query attention cannot hold: train one without")
        if module.add_zero_attn:
            raise OptionError("the module appends a key of zeros (add_zero_attn), which grouped-query attention lacks: train one without")
        state = convert_attention(module.state_dict(), module.num_heads, groups, method)
        weight = state["q_proj.weight"]
        layer = cls(
            module.embed_dim,
            module.num_heads,
            groups,
            key_width=module.kdim,
            value_width=module.vdim,
            bias=[name for name in PROJECTIONS if f"{name}_proj.bias" in state],
            dropout=module.dropout,
            batch_first=module.batch_first,
            device=weight.device,
            dtype=weight.dtype,
            **options,
        )
        fused = layer.fused
        layer.unfuse().load_state_dict(state)
        layer.train(module.training)
        return layer.fuse() if fused else layer
