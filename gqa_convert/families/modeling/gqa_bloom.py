"""BLOOM with fewer K/V heads than query heads (Ainslie et al. 2023).

This file is part of gqa-convert. It is copied, with gqa_common.py, into every checkpoint converted from this family, so
that transformers loads the checkpoint without gqa-convert.
"""

from typing import Any

from transformers.models.bloom.modeling_bloom import dropout_add

from .gqa_common import FusedAttention, attend, class_maker


class GroupedBloomAttention(FusedAttention):
    """BLOOM's attention with ALiBi for each query head, through the configured attention function."""

    is_causal = True

    def forward(
        self: Any, hidden_states: Any, residual: Any, alibi: Any, attention_mask: Any, layer_past: Any = None, **_: Any
    ) -> tuple[Any, Any]:
        query, key, value = self.split(self.query_key_value(hidden_states))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        batch, heads, length, _ = query.shape
        options = {
            "position_bias": alibi.view(batch, heads, 1, -1).expand(-1, -1, length, -1),
            "scaling": self.inv_norm_factor,
            "dropout": self.attention_dropout.p if self.training else 0.0,
        }
        output, weights = attend(self, query, key, value, attention_mask, **options)
        return dropout_add(self.dense(output), residual, self.hidden_dropout, self.training), weights


__getattr__ = class_maker(
    __name__, attention={"BloomAttention": GroupedBloomAttention}, eager_constructor=True, _supports_sdpa=True
)
