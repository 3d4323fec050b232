"""Persimmon with fewer K/V heads than query heads (Ainslie et al. 2023).

This file is part of gqa-convert. It is copied, with gqa_common.py, into every checkpoint converted from this family, so
that transformers loads the checkpoint without gqa-convert.
"""

from .gqa_common import FusedAttention, class_maker


class GroupedPersimmonAttention(FusedAttention):
    """Persimmon's attention, whose forward takes heads [B, L, heads, c] from the fused projection."""

    def _split_heads(self, fused_qkv):
        return [part.transpose(1, 2) for part in self.split(fused_qkv)]


__getattr__ = class_maker(__name__, attention={"PersimmonAttention": GroupedPersimmonAttention})
