"""T5, mT5, UMT5, LongT5 and Switch Transformers with fewer K/V heads than query heads (Ainslie et al. 2023).

This file is part of gqa-convert. It is copied, with gqa_common.py, into every checkpoint converted from one of these
families, so that transformers loads the checkpoint without gqa-convert.
"""

import functools

from .gqa_common import GroupedAttention, class_maker, grouped_forward


class GroupedT5Attention(GroupedAttention):
    projections = ("k", "v")
    heads_name = "n_heads"


@functools.cache
def t5_forward():
    """The forward function of T5's attention."""
    from transformers.models.t5.modeling_t5 import T5Attention

    return grouped_forward(T5Attention.forward)


class GroupedUMT5Attention(GroupedT5Attention):
    """UMT5's attention, which is T5's with a position bias in every layer."""

    gradient_checkpointing = False

    def forward(
        self,
        hidden_states,
        encoder_hidden_states=None,
        past_key_values=None,
        attention_mask=None,
        **options,
    ):
        given = hidden_states, attention_mask, encoder_hidden_states, None, past_key_values
        output, _, weights = t5_forward()(self, *given, **options)
        return output, weights


STOCK = ("LongT5Attention", "MT5Attention", "SwitchTransformersAttention", "T5Attention")

__getattr__ = class_maker(
    __name__, attention=dict.fromkeys(STOCK, GroupedT5Attention) | {"UMT5Attention": GroupedUMT5Attention}
)
