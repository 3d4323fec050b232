"""OPT with fewer K/V heads than query heads (Ainslie et al. 2023).

This file is part of gqa-convert. It is copied, with gqa_common.py, into every checkpoint
converted from this family, so that transformers loads the checkpoint without gqa-convert.
"""

from .gqa_common import GroupedAttention, attend, class_maker, split_heads


class GroupedOPTAttention(GroupedAttention):
    """OPT's attention, in which the queries rather than the scores are scaled."""

    handed_on = ("output_attentions",)

    def forward(self, hidden_states, attention_mask=None, **options):
        query = split_heads(self.q_proj(hidden_states) * self.scaling, self.head_dim)
        key = split_heads(self.k_proj(hidden_states), self.head_dim)
        value = split_heads(self.v_proj(hidden_states), self.head_dim)
        options["scaling"] = 1.0
        output, weights = attend(self, query, key, value, attention_mask, self.dropout, **options)
        return self.out_proj(output), weights


__getattr__ = class_maker(__name__, attention={"OPTAttention": GroupedOPTAttention})
