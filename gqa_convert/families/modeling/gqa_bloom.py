"""BLOOM with fewer K/V heads than query heads (Ainslie et al. 2023).

This file is part of gqa-convert. It is copied, with gqa_common.py, into every checkpoint
converted from this family, so that transformers loads the checkpoint without gqa-convert.
"""

from transformers.models.bloom.modeling_bloom import dropout_add

from .gqa_common import FusedAttention, attend, class_maker, misfit, sdpa_attention_forward, taken


class GroupedBloomAttention(FusedAttention):
    """BLOOM's attention with ALiBi for each query head, by the configured attention function."""

    is_causal = True
    handed_on = ("use_cache", "output_attentions")

    def regroup(self, num_key_value_groups):
        if "position_bias" not in taken(sdpa_attention_forward):
            raise misfit(type(self), "can't add ALiBi in sdpa attention")
        super().regroup(num_key_value_groups)

    def forward(self, hidden_states, residual, alibi, attention_mask, **options):
        query, key, value = self.split(self.query_key_value(hidden_states))
        batch, heads, length, _ = query.shape
        options["position_bias"] = alibi.view(batch, heads, 1, -1).expand(-1, -1, length, -1)
        options["scaling"] = self.inv_norm_factor
        output, weights = attend(
            self, query, key, value, attention_mask, self.attention_dropout.p, **options
        )
        return dropout_add(
            self.dense(output), residual, self.hidden_dropout, self.training
        ), weights


__getattr__ = class_maker(
    __name__,
    attention={"BloomAttention": GroupedBloomAttention},
    eager_constructor=True,
    _supports_sdpa=True,
)
