"""Decoders whose stock classes hold fewer K/V heads than query heads, with attention in every layer."""

from collections.abc import Iterator
from itertools import chain

from gqa_convert.families import decilm
from gqa_convert.families.family import Family, LegacyConfigKeys, make_family
from gqa_convert.families.records.building import (
    GATED_OUTPUT,
    INTERLEAVED,
    NO_ROTARY,
    WHOLE_HEAD,
    at,
    share_of_head,
    stock,
)
from gqa_convert.families.records.by_layer import decilm_form, with_forms

_LONGROPE_ONLY = LegacyConfigKeys(rope_scaling_keys=frozenset({"short_factor", "long_factor"}))
_FACTOR_ONLY = LegacyConfigKeys(rope_scaling_keys=frozenset({"factor"}))
_SCALES_UNLESS_NULL = LegacyConfigKeys(scales_unless_null=True)
_TWO_BASES = LegacyConfigKeys(local_rotary_base="rope_local_base_freq")


def decoders() -> Iterator[Family]:
    """The records, grouped by the norm of keys, with those of results whose layers differ."""
    yield from with_forms(
        chain(_by_layer(), _without_key_norm(), _with_key_norm_per_head(), _with_key_norm_over_all_heads())
    )


def one_or_all_heads() -> Iterator[Family]:
    """The records of types that have either one K/V head or as many as query heads."""
    yield from stock(
        "gpt_bigcode",
        **at("h", "n_layer num_hidden_layers", "transformer"),
        **NO_ROTARY,
        key_norm="none",
        attention=("attn",),
        fused="c_attn",
        fused_layout="grouped",
        output="c_proj",
        hidden_key="n_embd",
        heads_key="n_head",
        head_dim_key=None,
        kv_heads="heads",
        one_kv_head_key="multi_query",
        mlp="plain",
    )


def _by_layer() -> Iterator[Family]:
    """DeciLM, and the types that become one where their layers are to differ."""
    yield from stock(" ".join(decilm.SOURCES), **WHOLE_HEAD, key_norm="none", mlp="gated")
    yield make_family(
        model_type=decilm.MODEL_TYPE,
        **WHOLE_HEAD,
        key_norm="none",
        mlp="gated",
        kv_heads="blocks",
        engines=frozenset(),
        modeling=decilm_form("llama"),
        layerwise=(decilm_form("llama"),),
    )


def _without_key_norm() -> Iterator[Family]:
    yield from stock(
        "aria_text cohere_compass_text cwm gemma gemma2 granite granite_swa granitemoe granitemoe_swa "
        "granitemoeshared hyperclovax internlm3 iquestcoder ministral ministral3 mixtral phimoe "
        "qwen2_moe seed_oss smollm3 vaultgemma",
        **WHOLE_HEAD,
        key_norm="none",
        mlp="gated",
    )
    yield from stock("arcee jais2 starcoder2", **WHOLE_HEAD, key_norm="none", mlp="plain")
    yield from stock("olmo", **WHOLE_HEAD, key_norm="none", mlp="gated", legacy=_FACTOR_ONLY)
    yield from stock("nemotron", **share_of_head(0.5), key_norm="none", mlp="plain")
    yield from stock("solar_open", **share_of_head(1.0), key_norm="none", mlp="gated")
    yield from stock(
        "gpt_oss",
        **WHOLE_HEAD,
        key_norm="none",
        mlp="gated",
        document_mask="masks_by_kind",
        legacy=_SCALES_UNLESS_NULL,
    )
    yield from stock("cohere2 cohere2_moe ernie4_5 ernie4_5_moe helium", **INTERLEAVED, key_norm="none", mlp="gated")
    yield from stock("glm glm4", **share_of_head(0.5, pairs="interleaved"), key_norm="none", mlp="gated")
    yield from stock(
        "llama4_text",
        **INTERLEAVED,
        key_norm="none",
        gainless_key_norm=("use_qk_norm", True),
        mlp="gated",
        prefixes=("", "model.", "language_model.model.", "transformer."),
    )
    yield from stock(
        "bitnet",
        **WHOLE_HEAD,
        key_norm="none",
        value_constraint="a norm stands between its attention's output and the output projection",
        mlp="gated",
    )
    yield from stock(
        "phi3 phi4_multimodal",
        **share_of_head(1.0),
        key_norm="none",
        fused="qkv_proj",
        mlp="gated",
        legacy=_LONGROPE_ONLY,
    )
    yield from stock(
        "dbrx",
        **at("blocks", "n_layers", "transformer"),
        **WHOLE_HEAD,
        key_norm="none",
        hidden_key="d_model",
        attention=("norm_attn_norm.attn",),
        fused="Wqkv",
        output="out_proj",
        heads_key="n_heads",
        kv_heads_keys=("attn_config.kv_n_heads", "num_key_value_heads"),
        head_dim_key=None,
        mlp="gated",
    )


def _with_key_norm_per_head() -> Iterator[Family]:
    yield from stock(
        "dots1 exaone4 exaone_moe flint hy_v3 kolibri1 qwen3", **WHOLE_HEAD, key_norm="shared", mlp="gated"
    )
    yield from stock("apertus", **WHOLE_HEAD, key_norm="shared", mlp="plain", legacy=_SCALES_UNLESS_NULL)
    yield from stock("gemma3_text", **WHOLE_HEAD, key_norm="shared", mlp="gated", legacy=_TWO_BASES)
    yield from stock("glm4_moe", **share_of_head(0.5), key_norm="shared", mlp="gated")
    yield from stock("mellum", **share_of_head(1.0), key_norm="shared", mlp="gated")
    yield from stock(
        "qwen3_moe",
        **WHOLE_HEAD,
        key_norm="shared",
        mlp="gated",
        legacy=LegacyConfigKeys(renamed=(("num_local_experts", "num_experts"),)),
    )
    yield from stock(
        "afmoe",
        **WHOLE_HEAD,
        key_norm="shared",
        value_constraint=GATED_OUTPUT,
        mlp="gated",
        document_mask="masks_by_kind",
    )
    yield from stock("beam", **WHOLE_HEAD, key_norm="shared", value_constraint=GATED_OUTPUT, mlp="gated")
    yield from stock(
        "gemma3n_text",
        **WHOLE_HEAD,
        key_norm="shared",
        value_constraint="its values are normalised behind their projection",
        order_constrained_when=(("num_kv_shared_layers", "layers share keys and values"),),
        shared_layers_key="num_kv_shared_layers",
        mlp="gated",
        legacy=_TWO_BASES,
    )
    yield from stock(
        "nanochat",
        **WHOLE_HEAD,
        key_norm="shared",
        key_constraint="its keys are normalised behind their projection",
        mlp="plain",
    )
    yield from stock(
        "hunyuan_v1_dense hunyuan_v1_moe", **WHOLE_HEAD, key_norm="shared", key_norm_name="key_layernorm", mlp="gated"
    )
    yield from stock(
        "phi",
        **share_of_head(0.5),
        key_norm="shared",
        key_norm_name="k_layernorm",
        output="dense",
        mlp="plain",
    )
    yield from stock("cohere", **INTERLEAVED, key_norm="per_head", mlp="gated")
    yield from stock(
        "stablelm", **share_of_head(0.25), key_norm="per_head_list", key_norm_name="k_layernorm.norms", mlp="gated"
    )


def _with_key_norm_over_all_heads() -> Iterator[Family]:
    yield from stock("flex_olmo olmoe", **WHOLE_HEAD, key_norm="full", mlp="gated")
    yield from stock("minimax_m2", **share_of_head(1.0, count_key="rotary_dim"), key_norm="full", mlp="gated")
    yield from stock("olmo2", **WHOLE_HEAD, key_norm="full", mlp="gated", legacy=_FACTOR_ONLY)
    yield from stock("olmo3", **WHOLE_HEAD, key_norm="full", mlp="gated", legacy=LegacyConfigKeys(one_rotary_base=True))
