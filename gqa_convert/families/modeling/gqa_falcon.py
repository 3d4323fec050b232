"""Falcon with fewer K/V heads than query heads (Ainslie et al. 2023).

This file is part of gqa-convert. It is copied, with gqa_common.py, into every checkpoint converted
from this family, so that transformers loads the checkpoint without gqa-convert. `multi_query`,
`new_decoder_architecture` and `num_kv_heads` of the config say nothing about K/V heads here:
`num_key_value_heads` does.
"""

from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

from .gqa_common import FusedAttention, attend, class_maker


class GroupedFalconAttention(FusedAttention):
    """Falcon's attention with N K/V heads, also in the cache."""

    handed_on = ("position_ids", "use_cache", "output_attentions")

    def forward(self, hidden_states, alibi, attention_mask, position_embeddings=None, **options):
        kind = self.config._attn_implementation
        query, key, value = self.split(self.query_key_value(hidden_states))
        options["scaling"] = self.inv_norm_factor
        if alibi is None:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        elif kind == "eager":  # ALiBi is scaled with the scores; sdpa has it in the mask
            options["position_bias"] = (
                alibi.view(len(query), self.num_heads, 1, -1) * self.inv_norm_factor
            )
        elif kind != "sdpa":
            raise ValueError(f"Falcon with ALiBi runs with eager or sdpa attention, not {kind}")
        output, weights = attend(
            self, query, key, value, attention_mask, self.attention_dropout.p, **options
        )
        return self.dense(output), weights


__getattr__ = class_maker(
    __name__, attention={"FalconAttention": GroupedFalconAttention}, eager_constructor=True
)
