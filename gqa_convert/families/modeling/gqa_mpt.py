"""MPT with fewer K/V heads than query heads (Ainslie et al. 2023).

This file is part of gqa-convert. It is copied, with gqa_common.py, into every checkpoint
converted from this family, so that transformers loads the checkpoint without gqa-convert.
"""

import torch

from .gqa_common import FusedAttention, attend, class_maker


class GroupedMptAttention(FusedAttention):
    """MPT's attention with ALiBi for each query head. The mask is boolean and true where a query
    must not look.
    """

    projection = "Wqkv"
    heads_name = "n_heads"

    def forward(self, hidden_states, position_bias, attention_mask=None, **options):
        states = self.Wqkv(hidden_states)
        if self.clip_qkv:
            states = states.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = self.split(states)
        cache = options.pop(self.cache_name, None)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx, kwargs=options)
        bias = position_bias[
            None, :, :, -key.shape[2] :
        ]  # ALiBi [H, 1, longest] counts back from its end
        if attention_mask is not None:
            bias = torch.where(attention_mask, torch.finfo(query.dtype).min, bias)
        options |= {"position_bias": bias, "scaling": self.softmax_scale}
        output, weights = attend(self, query, key, value, None, self.attn_dropout_p, **options)
        return self.out_proj(output), weights


__getattr__ = class_maker(__name__, attention={"MptAttention": GroupedMptAttention})
