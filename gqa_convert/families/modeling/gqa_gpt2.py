"""GPT-2 with fewer K/V heads than query heads (Ainslie et al. 2023).

This file is part of gqa-convert. It is copied, with gqa_common.py, into every checkpoint
converted from this family, so that transformers loads the checkpoint without gqa-convert.
"""

from transformers.pytorch_utils import Conv1D

from .gqa_common import GroupedAttention, class_maker


class GroupedGPT2Attention(GroupedAttention):
    """GPT-2's attention: `c_attn` is [q | k | v], or [k | v] beside `q_attn` where it reads an
    encoder's output.
    """

    replaced = (*GroupedAttention.replaced, "_upcast_and_reordered_attn", "split_size")

    def regroup(self, num_key_value_groups):
        self.num_key_value_groups = num_key_value_groups
        width = self.embed_dim // num_key_value_groups
        widths = [width, width] if self.is_cross_attention else [self.embed_dim, width, width]
        self.split_size = widths  # of the parts that the forward takes from c_attn
        self.c_attn = Conv1D(sum(widths), self.embed_dim)

    def _upcast_and_reordered_attn(self, query, key, value, mask=None):
        size = self.num_key_value_groups
        key, value = key.repeat_interleave(size, 1), value.repeat_interleave(size, 1)
        return super()._upcast_and_reordered_attn(query, key, value, mask)


__getattr__ = class_maker(__name__, attention={"GPT2Attention": GroupedGPT2Attention})
