"""GPT-NeoX with fewer K/V heads than query heads (Ainslie et al. 2023).

This file is part of gqa-convert. It is copied, with gqa_common.py, into every checkpoint
converted from this family, so that transformers loads the checkpoint without gqa-convert.
"""

from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb

from .gqa_common import FusedAttention, attend, class_maker


class GroupedGPTNeoXAttention(FusedAttention):
    @property
    def num_heads(self):
        """Query heads."""
        return int(self.config.num_attention_heads)

    def forward(self, hidden_states, attention_mask, position_embeddings=None, **options):
        query, key, value = self.split(self.query_key_value(hidden_states))
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        options["scaling"] = self.scaling
        output, weights = attend(
            self, query, key, value, attention_mask, self.attention_dropout, **options
        )
        return self.dense(output), weights


__getattr__ = class_maker(__name__, attention={"GPTNeoXAttention": GroupedGPTNeoXAttention})

# Checkpoints call the output layer `embed_out`, transformers calls it `lm_head` and translates for
# its own classes
# only.
register_checkpoint_conversion_mapping(
    "GQAGPTNeoXForCausalLM",
    get_checkpoint_conversion_mapping("GPTNeoXForCausalLM") or [],
    overwrite=True,
)
