"""Model types of 2023 that load by the code in their checkpoints, as the stock types that compute the same. Every default
is that of its own code.
"""

import math
from dataclasses import replace
from typing import Any, Final

from gqa_convert.checkpoint.strict_json import Config, JsonObject
from gqa_convert.conversion.rewriting.stock_form import NoStockClassError, StockForm, modules, refused_value
from gqa_convert.families.records import RESTATED as STOCK_TYPES


def _scaling(config: Config, _stock: JsonObject) -> JsonObject:
    """InternLM2's and MiniCPM's, whose custom code has the formulas of stock classes."""
    stated = config.get("rope_scaling")
    if stated is None:
        return {}
    kind = stated.get("rope_type", stated.get("type")) if isinstance(stated, dict) else None
    if kind not in ("linear", "dynamic"):
        raise refused_value("rope_scaling", stated)
    return {"rope_scaling": {"rope_type": kind, "factor": float(stated.get("factor", 1.0))}}


def _internlm(config: Config, _stock: JsonObject) -> JsonObject:
    rotary = config.get("rotary") or {"type": "origin"}
    if not isinstance(rotary, dict) or rotary.get("type") not in ("origin", "dynamic"):
        raise refused_value("rotary", rotary)
    positions = {"rope_theta": rotary.get("base", 10000.0)}
    if rotary["type"] == "dynamic":
        factor = float(rotary.get("scaling_factor", 1.0))
        positions["rope_scaling"] = {"rope_type": "dynamic", "factor": factor}
    return positions


def _baichuan(config: Config, _stock: JsonObject) -> JsonObject:
    if config.get("max_position_embeddings") is None or config.get("hidden_size") == 5120:
        raise NoStockClassError(
            "the shape of a 13B Baichuan, which has ALiBi instead of rotary positions: only the 7B can be rewritten"
        )
    if not config.get("architectures"):  # the class tells the two versions apart
        raise refused_value("architectures", None)
    return {}


def _qwen(config: Config, stock: JsonObject) -> JsonObject:
    """Beyond `seq_length` its own code scales positions (use_dynamic_ntk) and queries (use_logn_attn) by the length of
    the text.
    """
    head_dim = stock["hidden_size"] // stock["num_attention_heads"]
    if config.get("kv_channels", head_dim) != head_dim:
        raise refused_value("kv_channels", config["kv_channels"])
    return {"intermediate_size": stock["intermediate_size"] // 2}


def _minicpm(config: Config, stock: JsonObject) -> JsonObject:
    hidden = stock["hidden_size"]
    return _scaling(config, stock) | {
        "residual_multiplier": config.get("scale_depth", 1) / math.sqrt(stock["num_hidden_layers"]),
        "attention_multiplier": 1 / math.sqrt(hidden // stock["num_attention_heads"]),
        "logits_scaling": hidden / config.get("dim_model_base", 1),
    }


_LLAMA = """
    hidden_size              hidden_size              count
    num_attention_heads      num_attention_heads      count
    num_hidden_layers        num_hidden_layers        count
    intermediate_size        intermediate_size        count
    vocab_size               vocab_size               count
    hidden_act               hidden_act               "silu"
    tie_word_embeddings      tie_word_embeddings      false
    max_position_embeddings  max_position_embeddings  2048
    num_key_value_heads      num_key_value_heads      count=num_attention_heads
    rms_norm_eps             rms_norm_eps             1e-06
    rope_theta               rope_theta               10000.0
"""
_ALL_HEADS = "num_key_value_heads - count=num_attention_heads\n"
"""Of types whose custom code reads no K/V-head count."""
_UNSCALED = "rope_scaling null\n"

_LLAMA_MODULES = """
    model.embed_tokens         model.embed_tokens
    .self_attn.q_proj          self_attn.q_proj
    .self_attn.k_proj          self_attn.k_proj
    .self_attn.v_proj          self_attn.v_proj
    .self_attn.o_proj          self_attn.o_proj
    .mlp.gate_proj             mlp.gate_proj
    .mlp.up_proj               mlp.up_proj
    .mlp.down_proj             mlp.down_proj
    .input_layernorm           input_layernorm
    .post_attention_layernorm  post_attention_layernorm
    model.norm                 model.norm
    lm_head                    lm_head
"""


def _like_llama(
    model_type: str,
    own_class: str,
    stock_class: str = "LlamaForCausalLM",
    keys: str = "",
    renamed: str = "",
    **fields: Any,
) -> StockForm:
    """The form of a type that is Llama, but for some config keys and some modules."""
    return StockForm(
        model_type=model_type,
        stock=STOCK_TYPES[model_type],
        classes=dict.fromkeys(own_class.split(), stock_class),
        config=_LLAMA + keys,
        modules=modules(_LLAMA_MODULES + renamed),
        **{"bias_key": "attention_bias"} | fields,
    )


_FALCON = """
    hidden_size          hidden_size         count
    num_attention_heads  n_head              count
    num_hidden_layers    n_layer             count
    vocab_size           vocab_size          count
    layer_norm_epsilon   layer_norm_epsilon  1e-05
    alibi                alibi               false
    bias                 bias                false
    rope_theta           -                   10000.0
"""
_REFINED_WEB_MODEL = StockForm(
    model_type="RefinedWebModel",
    stock="falcon",
    classes={"RWForCausalLM": "FalconForCausalLM", "FalconForCausalLM": "FalconForCausalLM"},
    config=_FALCON
    + """
    new_decoder_architecture  -              false
    multi_query               multi_query    false
    parallel_attn             parallel_attn  false
    """,
    only="apply_residual_connection_post_layernorm null\n",
)

_FORMS: Final = (
    _like_llama("internlm", "InternLMForCausalLM", keys=_ALL_HEADS, only=_UNSCALED, further=_internlm),
    _like_llama(
        "internlm2",
        "InternLM2ForCausalLM",
        further=_scaling,
        renamed="""
        model.embed_tokens         model.tok_embeddings
        .self_attn.{q,k,v}_proj    attention.wqkv
        .self_attn.o_proj          attention.wo
        .mlp.gate_proj             feed_forward.w1
        .mlp.up_proj               feed_forward.w3
        .mlp.down_proj             feed_forward.w2
        .input_layernorm           attention_norm
        .post_attention_layernorm  ffn_norm
        lm_head                    output
        """,
        fused_layout="grouped",
    ),
    _like_llama(
        "baichuan",
        "BaiChuanForCausalLM BaichuanForCausalLM",
        keys=_ALL_HEADS,
        only=_UNSCALED,
        further=_baichuan,
        renamed="""
        .self_attn.{q,k,v}_proj  self_attn.W_pack
        """,
        fused_layout="blocks",
        unit_head="BaichuanForCausalLM",
    ),
    _like_llama(
        "qwen",
        "QWenLMHeadModel",
        "Qwen2ForCausalLM",
        keys=_ALL_HEADS
        + """
        rms_norm_eps             layer_norm_epsilon  1e-06
        max_position_embeddings  seq_length          8192
        rope_theta               rotary_emb_base     10000.0
        use_sliding_window       -                   false
        """,
        only="rotary_pct 1.0\nno_bias true\nscale_attn_weights true",
        further=_qwen,
        renamed="""
        model.embed_tokens         transformer.wte
        .self_attn.{q,k,v}_proj    attn.c_attn
        .self_attn.o_proj          attn.c_proj
        .mlp.gate_proj             mlp.w2
        .mlp.up_proj               mlp.w1
        .mlp.down_proj             mlp.c_proj
        .input_layernorm           ln_1
        .post_attention_layernorm  ln_2
        model.norm                 transformer.ln_f
        """,
        layers=("transformer.h", "model.layers"),
        fused_layout="blocks",
        bias_key="",
        same_up_to="seq_length",
    ),
    _like_llama(
        "minicpm",
        "MiniCPMForCausalLM",
        "GraniteForCausalLM",
        keys="""
        tie_word_embeddings   tie_word_embeddings  true
        embedding_multiplier  scale_emb            1
        mlp_bias              -                    false
        """,
        only="num_experts null\nsparse_config null",
        further=_minicpm,
    ),
    _REFINED_WEB_MODEL,
    replace(
        _REFINED_WEB_MODEL,
        model_type="RefinedWeb",
        config=_FALCON
        + """
        num_kv_heads              n_head_kv  count=num_attention_heads
        new_decoder_architecture  -          true
        multi_query               -          true
        parallel_attn             -          true
        """,
        only=_REFINED_WEB_MODEL.only + "parallel_attn true",
    ),
)

REMOTE_CODE: Final = {form.model_type: form for form in _FORMS}
"""All forms by model type."""
