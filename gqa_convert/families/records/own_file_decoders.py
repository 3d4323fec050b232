"""Decoders whose attention has no K/V-head count in transformers, so that the result needs a modelling file."""

from collections.abc import Iterator

from gqa_convert.families.family import Family, LegacyConfigKeys
from gqa_convert.families.records.building import (
    ALIBI_FROM_PADDING,
    ALIBI_SLOPES,
    GPTJ_ROTARY,
    NO_ROTARY,
    WHOLE_HEAD,
    Fields,
    at,
    own_file,
    share_of_head,
)

_EVERY_TASK = "Model ForCausalLM ForSequenceClassification ForTokenClassification ForQuestionAnswering"

_FUSED_PER_HEAD: Fields = {
    "fused": "query_key_value",
    "fused_layout": "grouped",
    "output": "dense",
    "head_dim_key": None,
    "mlp": "plain",
}


def _refused_mpt(kind: str, heads: str) -> tuple[str, tuple[str], str]:
    reason = (
        f"its attention has {heads} already, which only llm-foundry's own code loads; transformers' Mpt has as many "
        "K/V heads as query heads"
    )
    return "attn_config.attn_type", (kind,), reason


_GROUPED_MPT = (
    _refused_mpt("grouped_query_attention", "grouped K/V heads (attn_config.kv_n_heads)"),
    _refused_mpt("multiquery_attention", "one K/V head"),
)


def own_file_decoders() -> Iterator[Family]:
    """The records, by how positions enter."""
    yield from _with_position_embeddings()
    yield from _with_rotary_positions()
    yield from _with_alibi()


def _with_position_embeddings() -> Iterator[Family]:
    yield from own_file(
        "gqa_opt",
        "opt",
        "OPT",
        "Model ForCausalLM ForSequenceClassification ForQuestionAnswering",
        tokenizer="GPT2Tokenizer",
        **at("decoder.layers", "num_hidden_layers", "model"),
        **NO_ROTARY,
        key_norm="none",
        output="out_proj",
        head_dim_key=None,
        mlp="plain",
        document_mask="mask",
    )
    yield from own_file(
        "gqa_biogpt",
        "biogpt",
        "BioGpt",
        "Model ForCausalLM ForSequenceClassification ForTokenClassification",
        tokenizer="BioGptTokenizer",
        **at("layers", "num_hidden_layers", "biogpt"),
        **NO_ROTARY,
        key_norm="none",
        output="out_proj",
        head_dim_key=None,
        mlp="plain",
        document_mask="mask",
    )
    yield from own_file(
        "gqa_gpt2",
        "gpt2",
        "GPT2",
        "Model LMHeadModel ForSequenceClassification ForTokenClassification ForQuestionAnswering",
        tokenizer="GPT2Tokenizer",
        **at("h", "n_layer num_hidden_layers", "transformer"),
        **NO_ROTARY,
        key_norm="none",
        attention=("attn", "crossattention"),
        cross_attention=("crossattention",),
        fused="c_attn",
        query="q_attn",
        output="c_proj",
        transposed=True,
        hidden_key="n_embd",
        heads_key="n_head",
        head_dim_key=None,
        mlp="plain",
    )
    yield from own_file(
        "gqa_gpt_neo",
        "gpt_neo",
        "GPTNeo",
        _EVERY_TASK,
        tokenizer="GPT2Tokenizer",
        **at("h", "num_layers num_hidden_layers", "transformer"),
        **NO_ROTARY,
        key_norm="none",
        attention=("attn.attention",),
        output="out_proj",
        heads_key="num_heads",
        head_dim_key=None,
        mlp="plain",
    )


def _with_rotary_positions() -> Iterator[Family]:
    yield from own_file(
        "gqa_gptj",
        "gptj",
        "GPTJ",
        "Model ForCausalLM ForSequenceClassification ForQuestionAnswering",
        tokenizer="GPT2Tokenizer",
        **at("h", "n_layer num_hidden_layers", "transformer"),
        **GPTJ_ROTARY,
        key_norm="none",
        attention=("attn",),
        output="out_proj",
        hidden_key="n_embd",
        heads_key="n_head",
        head_dim_key=None,
        mlp="plain",
    )
    yield from own_file(
        "gqa_codegen",
        "codegen",
        "CodeGen",
        "Model ForCausalLM",
        tokenizer="GPT2Tokenizer",
        **at("h", "n_layer num_hidden_layers", "transformer"),
        **GPTJ_ROTARY,
        key_norm="none",
        attention=("attn",),
        fused="qkv_proj",
        fused_layout="quarters",
        output="out_proj",
        hidden_key="n_embd",
        heads_key="n_head",
        head_dim_key=None,
        mlp="plain",
    )
    yield from own_file(
        "gqa_gpt_neox",
        "gpt_neox",
        "GPTNeoX",
        _EVERY_TASK,
        tokenizer="GPTNeoXTokenizerFast",
        **at("layers", "num_hidden_layers", "gpt_neox"),
        **share_of_head(0.25),
        key_norm="none",
        attention=("attention",),
        **_FUSED_PER_HEAD,
        legacy=LegacyConfigKeys(rotary_base="rotary_emb_base", rotary_share="rotary_pct"),
    )
    yield from own_file(
        "gqa_persimmon",
        "persimmon",
        "Persimmon",
        "Model ForCausalLM ForSequenceClassification ForTokenClassification",
        tokenizer="TokenizersBackend",
        **share_of_head(0.5),
        key_norm="shared",
        key_norm_name="k_layernorm",
        **_FUSED_PER_HEAD,
    )


def _with_alibi() -> Iterator[Family]:
    yield from own_file(
        "gqa_bloom",
        "bloom",
        "Bloom",
        _EVERY_TASK,
        tokenizer="TokenizersBackend",
        **at("h", "n_layer num_hidden_layers", "transformer"),
        **NO_ROTARY,
        key_norm="none",
        attention=("self_attention",),
        heads_key="n_head",
        order_constraints=(("decoder", ALIBI_SLOPES),),
        document_constraint=ALIBI_FROM_PADDING,
        **_FUSED_PER_HEAD,
    )
    yield from own_file(
        "gqa_falcon",
        "falcon",
        "Falcon",
        _EVERY_TASK,
        tokenizer="TokenizersBackend",
        **at("h", "num_hidden_layers n_layer", "transformer"),
        **WHOLE_HEAD,
        rotary_only_when=("alibi", False),
        key_norm="none",
        attention=("self_attention",),
        kv_heads="falcon",
        order_constrained_when=(("alibi", ALIBI_SLOPES),),
        document_mask="mask",
        document_constrained_when=(("alibi", ALIBI_FROM_PADDING),),
        **_FUSED_PER_HEAD,
    )
    yield from own_file(
        "gqa_mpt",
        "mpt",
        "Mpt",
        _EVERY_TASK,
        tokenizer="GPTNeoXTokenizerFast",
        **at("blocks", "n_layers num_hidden_layers", "transformer"),
        **NO_ROTARY,
        key_norm="none",
        attention=("attn",),
        fused="Wqkv",
        output="out_proj",
        hidden_key="d_model",
        heads_key="n_heads",
        head_dim_key=None,
        mlp="plain",
        order_constraints=(("decoder", ALIBI_SLOPES),),
        document_mask="mask",
        refused_values=_GROUPED_MPT,
    )
