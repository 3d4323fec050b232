"""T5, mT5, UMT5, LongT5 and Switch Transformers with fewer K/V heads than query heads (Ainslie et
al. 2023).

This file is part of gqa-convert. It is copied, with gqa_common.py, into every checkpoint
converted from one of these families, so that transformers loads the checkpoint without gqa-convert.
"""

import functools

from .gqa_common import GroupedAttention, attention_class, class_maker


class GroupedT5Attention(GroupedAttention):
    projections = ("k", "v")
    heads_name = "n_heads"


@functools.cache
def t5_forward():
    """The forward function of T5's attention."""
    from transformers.models.t5.modeling_t5 import T5Attention

    return attention_class(T5Attention, GroupedT5Attention).forward


class GroupedUMT5Attention(GroupedT5Attention):
    """UMT5's attention, which is T5's with a position bias in every layer."""

    gradient_checkpointing = False

    def forward(self, hidden_states, encoder_hidden_states=None, attention_mask=None, **options):
        states = {"mask": attention_mask, "key_value_states": encoder_hidden_states}
        output, _, weights = t5_forward()(self, hidden_states, **states, **options)
        return output, weights


STOCK = ("LongT5Attention", "MT5Attention", "SwitchTransformersAttention", "T5Attention")

__getattr__ = class_maker(
    __name__,
    attention=dict.fromkeys(STOCK, GroupedT5Attention) | {"UMT5Attention": GroupedUMT5Attention},
)
