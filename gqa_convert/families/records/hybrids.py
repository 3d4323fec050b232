"""Decoders whose stock classes hold fewer K/V heads than query heads, with recurrences or convolutions in some layers
or beside their attention.
"""

from collections.abc import Iterator

from gqa_convert.families.family import Family, LegacyConfigKeys
from gqa_convert.families.records.building import (
    GATED_OUTPUT,
    NO_ROTARY,
    RECURRENT,
    WHOLE_HEAD,
    share_of_head,
    stock,
)


def hybrids() -> Iterator[Family]:
    """The records. Packed documents can't be kept apart in any of them, unless the config lists only attention."""
    yield from stock(
        "bamba",
        **share_of_head(0.5),
        key_norm="none",
        mlp="gated",
        without_attention=("mamba",),
        document_constraint=RECURRENT,
        legacy=LegacyConfigKeys(scaled_share=0.5),
    )
    yield from stock("falcon_h1", **WHOLE_HEAD, key_norm="none", mlp="gated", document_constraint=RECURRENT)
    yield from stock(
        "minimax",
        **WHOLE_HEAD,
        key_norm="none",
        mlp="gated",
        without_attention=("self_attn.qkv_proj",),
        document_constraint=RECURRENT,
    )
    yield from stock(
        "granitemoehybrid",
        **WHOLE_HEAD,
        rotary_only_when=("position_embedding_type", "rope"),
        key_norm="none",
        mlp="gated",
        without_attention=("mamba",),
        document_constraint=RECURRENT,
        document_mask="masks_by_kind",
    )
    yield from stock(
        "jamba",
        **NO_ROTARY,
        key_norm="none",
        mlp="gated",
        without_attention=("mamba",),
        document_constraint=RECURRENT,
    )
    yield from stock(
        "nemotron_h",
        **NO_ROTARY,
        key_norm="none",
        mlp="plain",
        layers=(("layers", ("num_hidden_layers", "layers_block_type")),),
        prefixes=("", "backbone.", "model.", "model.model.", "model.backbone."),
        attention=("mixer",),
        without_attention=("mixer",),
        document_constraint=RECURRENT,
    )
    yield from stock(
        "zamba",
        **NO_ROTARY,
        key_norm="none",
        mlp="gated",
        head_dim_key="attention_head_dim",
        attention_input_key="attention_hidden_size",
        without_attention=("mamba", "mamba_decoder"),
        document_constraint=RECURRENT,
    )
    yield from stock(
        "zamba2",
        **WHOLE_HEAD,
        rotary_only_when=("use_mem_rope", True),
        key_norm="none",
        mlp="gated",
        head_dim_key="attention_head_dim",
        attention_input_key="attention_hidden_size",
        without_attention=("mamba", "mamba_decoder"),
        document_constraint=RECURRENT,
        refused_when=(("use_shared_attention_adapter", "adapters beside its projections write to every K/V head"),),
    )
    yield from stock(
        "recurrent_gemma",
        **share_of_head(0.5),
        key_norm="none",
        mlp="gated",
        attention=("temporal_block",),
        without_attention=("temporal_block.conv_1d",),
        document_constraint=RECURRENT,
    )
    yield from stock(
        "lfm3",
        **share_of_head(1.0),
        key_norm="shared",
        mlp="gated",
        without_attention=("conv",),
        document_constraint=RECURRENT,
    )
    yield from stock(
        "lfm2 lfm2_moe",
        **WHOLE_HEAD,
        key_norm="shared",
        key_norm_name="k_layernorm",
        mlp="gated",
        output="out_proj",
        without_attention=("conv",),
        document_constraint=RECURRENT,
    )
    for model_types, default in (("qwen3_5_moe_text qwen3_5_text qwen3_next", 0.25), ("qwen4_exp_text", 1.0)):
        yield from stock(
            model_types,
            **share_of_head(default),
            key_norm="shared",
            value_constraint=GATED_OUTPUT,
            order_constraints=(("decoder", GATED_OUTPUT),),
            query_outputs=2,
            mlp="gated",
            without_attention=("linear_attn",),
            document_constraint=RECURRENT,
        )
    yield from stock(
        "olmo_hybrid",
        **WHOLE_HEAD,
        key_norm="full",
        mlp="gated",
        without_attention=("linear_attn",),
        document_constraint=RECURRENT,
    )
