"""GPT-Neo with fewer K/V heads than query heads (Ainslie et al. 2023).

This file is part of gqa-convert. It is copied, with gqa_common.py, into every checkpoint converted from this family, so
that transformers loads the checkpoint without gqa-convert.
"""

from typing import Any

import torch
from torch import nn

from .gqa_common import GroupedAttention, attend, class_maker, repeating, split_heads


@repeating
def eager_attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **_options: Any) -> tuple[Any, Any]:
    """Unscaled attention; scores and softmax in float32, as GPT-Neo was trained."""
    scores = torch.matmul(query.float(), key.float().transpose(-1, -2))
    weights = module.attn_dropout(nn.functional.softmax(scores + mask, dim=-1).to(value.dtype))
    return torch.matmul(weights, value).transpose(1, 2), weights


class GroupedGPTNeoAttention(GroupedAttention):
    """GPT-Neo's attention through the configured attention function; every other layer sees a window of keys."""

    def within_window(self: Any, mask: Any, length: int, total: int, seen: Any, device: Any) -> Any:
        """`mask`, restricted to keys that are neither ahead of their query nor behind its window; additive for eager.

        Positions count from the cache's beginning, so the empty end of a static cache does no harm.

        Args:
            mask: None, boolean or additive, broadcasting to [B, 1, L, S].
            length: L.
            total: S.
            seen: the number of keys that were in the cache.
            device: of the mask.
        """
        queries, keys = torch.arange(length, device=device)[:, None] + seen, torch.arange(total, device=device)
        allowed = keys <= queries
        if self.attention_type == "local":
            allowed = allowed & (keys > queries - self.config.window_size)
        allowed = allowed[None, None]
        if mask is not None and mask.dtype == torch.bool:
            allowed, mask = allowed & mask, None
        eager = self.config._attn_implementation == "eager"
        if mask is None and not eager:
            return allowed
        dtype = torch.float32 if mask is None else mask.dtype
        added = torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill(~allowed, torch.finfo(dtype).min)
        return added if mask is None else added + mask

    def forward(
        self: Any, hidden_states: Any, attention_mask: Any = None, layer_past: Any = None, **options: Any
    ) -> tuple[Any, Any]:
        query = split_heads(self.q_proj(hidden_states), self.head_dim)
        key = split_heads(self.k_proj(hidden_states), self.head_dim)
        value = split_heads(self.v_proj(hidden_states), self.head_dim)
        seen: Any = 0
        if layer_past is not None:
            seen = layer_past.get_seq_length(self.layer_id) + 0  # a static cache updates its own number in place
            key, value = layer_past.update(key, value, self.layer_id)
        kind = self.config._attn_implementation
        if "flash" not in kind and "paged" not in kind:  # these functions apply the window themselves
            sizes = query.shape[2], key.shape[2]
            attention_mask = self.within_window(attention_mask, *sizes, seen, query.device)
        options |= {
            "scaling": 1.0,
            "sliding_window": self.config.window_size if self.attention_type == "local" else None,
            "dropout": self.attn_dropout.p if self.training else 0.0,
        }
        output, weights = attend(self, query, key, value, attention_mask, eager_attention, **options)
        return self.resid_dropout(self.out_proj(output)), weights


__getattr__ = class_maker(
    __name__, attention={"GPTNeoSelfAttention": GroupedGPTNeoAttention}, eager_constructor=True, _supports_sdpa=True
)
