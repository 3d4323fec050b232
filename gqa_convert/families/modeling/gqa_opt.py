"""OPT with fewer K/V heads than query heads (Ainslie et al. 2023).

This file is part of gqa-convert. It is copied, with gqa_common.py, into every checkpoint converted from this family, so
that transformers loads the checkpoint without gqa-convert.
"""

from typing import Any

from .gqa_common import GroupedAttention, attend, class_maker, split_heads


class GroupedOPTAttention(GroupedAttention):
    """OPT's attention, in which the queries rather than the scores are scaled."""

    def forward(
        self: Any, hidden_states: Any, past_key_values: Any = None, attention_mask: Any = None, **options: Any
    ) -> tuple[Any, Any]:
        query = split_heads(self.q_proj(hidden_states) * self.scaling, self.head_dim)
        key = split_heads(self.k_proj(hidden_states), self.head_dim)
        value = split_heads(self.v_proj(hidden_states), self.head_dim)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        dropout = self.dropout if self.training else 0.0
        options |= {"scaling": 1.0, "dropout": dropout}
        output, weights = attend(self, query, key, value, attention_mask, **options)
        return self.out_proj(output), weights


__getattr__ = class_maker(__name__, attention={"OPTAttention": GroupedOPTAttention})
