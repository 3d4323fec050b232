"""GPT-NeoX with fewer K/V heads than query heads (Ainslie et al. 2023).

This file is part of gqa-convert. It is copied, with gqa_common.py, into every checkpoint converted from this family, so
that transformers loads the checkpoint without gqa-convert.
"""

from typing import Any

from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb

from .gqa_common import FusedAttention, attend, class_maker


class GroupedGPTNeoXAttention(FusedAttention):
    @property
    def num_heads(self: Any) -> int:
        """Query heads."""
        return int(self.config.num_attention_heads)

    def forward(
        self: Any,
        hidden_states: Any,
        attention_mask: Any,
        layer_past: Any = None,
        position_embeddings: Any = None,
        **options: Any,
    ) -> tuple[Any, Any]:
        query, key, value = self.split(self.query_key_value(hidden_states))
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        dropout = self.attention_dropout if self.training else 0.0
        options |= {"scaling": self.scaling, "dropout": dropout}
        output, weights = attend(self, query, key, value, attention_mask, **options)
        return self.dense(output), weights


__getattr__ = class_maker(__name__, attention={"GPTNeoXAttention": GroupedGPTNeoXAttention})

# Checkpoints call the output layer `embed_out`, transformers calls it `lm_head` and translates for its own classes
# only.
register_checkpoint_conversion_mapping(
    "GQAGPTNeoXForCausalLM", get_checkpoint_conversion_mapping("GPTNeoXForCausalLM") or [], overwrite=True
)
