"""T5, mT5, LongT5 and Switch Transformers with fewer K/V heads than query heads (Ainslie et al. 2023).

This file is part of gqa-convert. It is copied, with gqa_common.py, into every checkpoint converted from one of these
families, so that transformers loads the checkpoint without gqa-convert.
"""

from .gqa_common import GroupedAttention, class_maker


class GroupedT5Attention(GroupedAttention):
    projections = ("k", "v")
    heads_name = "n_heads"


STOCK = ("LongT5Attention", "MT5Attention", "SwitchTransformersAttention", "T5Attention")

__getattr__ = class_maker(__name__, attention=dict.fromkeys(STOCK, GroupedT5Attention))
