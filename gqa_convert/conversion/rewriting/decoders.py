"""GPT-NeoX, GPT-J, CodeGen and GPT-2 as stock types that have a K/V-head count: tables, and the conditions under which
they compute the same.
"""

import math
from dataclasses import replace
from typing import Any, Final

from gqa_convert.checkpoint.strict_json import Config, JsonObject
from gqa_convert.conversion.rewriting.stock_form import NoStockClassError, StockForm, count, entries, modules
from gqa_convert.errors import ConfigError
from gqa_convert.families.table import FAMILIES

_ROPE_TYPES = frozenset({"default", "linear", "dynamic", "yarn", "longrope", "llama3"})
"""Kinds of rotary scaling that source and stock class compute with the same function of transformers."""

_DROPPED = frozenset(
    [
        "activation_function",
        "add_cross_attention",
        "architectures",
        "attention_bias",
        "attention_dropout",
        "attn_pdrop",
        "classifier_dropout",
        "embd_pdrop",
        "embedding_dropout",
        "head_dim",
        "hidden_act",
        "hidden_dropout",
        "hidden_size",
        "intermediate_size",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "max_position_embeddings",
        "model_type",
        "n_ctx",
        "n_embd",
        "n_head",
        "n_inner",
        "n_layer",
        "n_positions",
        "norm_epsilon",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "partial_rotary_factor",
        "qk_layernorm",
        "reorder_and_upcast_attn",
        "resid_pdrop",
        "residual_dropout",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "rotary",
        "rotary_dim",
        "rotary_emb_base",
        "rotary_pct",
        "scale_attn_by_inverse_layer_idx",
        "scale_attn_weights",
        "sliding_window",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "use_bias",
        "use_parallel_residual",
    ]
)
"""Keys that mean nothing, or something else, in the stock type; all that it reads is written anew."""


def partial_factor(rotated: int, head_dim: int) -> float:
    """The share from which software computes `rotated` as int(head_dim * share)."""
    factor = rotated / head_dim
    return factor if int(head_dim * factor) == rotated else math.nextafter(factor, 1.0)


def _sizes(config: Config) -> tuple[int, int, int, int]:
    """Hidden size, heads, layers and intermediate size.

    Raises:
        ConfigError: one is missing or absurd, or the heads do not divide the hidden size.
    """
    hidden, heads = count(config, "n_embd", "hidden_size"), count(config, "n_head", "num_attention_heads")
    if hidden % heads:
        raise ConfigError(
            f"config.json has {heads} heads, which do not divide the hidden size {hidden}: repair the config"
        )
    if config["model_type"] == "gpt_neox":
        inner = count(config, "intermediate_size")
    else:
        inner = 4 * hidden if config.get("n_inner") is None else count(config, "n_inner")
    return hidden, heads, count(config, "n_layer", "num_hidden_layers"), inner


def _tokenizer(config: Config) -> str:
    """The tokenizer class, without which that of the stock type would be chosen."""
    modeling = FAMILIES[config["model_type"]].modeling
    assert modeling is not None
    return config.get("tokenizer_class") or modeling.tokenizer


_NEOX = """
    vocab_size               vocab_size               count
    initializer_range        initializer_range        0.02
    use_cache                use_cache                true
    tie_word_embeddings      tie_word_embeddings      false
    bos_token_id             bos_token_id             0
    eos_token_id             eos_token_id             2
    pad_token_id             pad_token_id             null
    hidden_act               hidden_act               "gelu"
    attention_dropout        attention_dropout        0.0
    max_position_embeddings  max_position_embeddings  2048
"""
_PHI_FROM_NEOX = """
    layer_norm_eps  layer_norm_eps  1e-05
    resid_pdrop     hidden_dropout  0.0
    embd_pdrop      hidden_dropout  0.0
"""
_STARCODER2_FROM_NEOX = """
    norm_epsilon       layer_norm_eps  1e-05
    residual_dropout   hidden_dropout  0.0
    embedding_dropout  hidden_dropout  0.0
"""
_GPT = """
    vocab_size           vocab_size           count
    initializer_range    initializer_range    0.02
    use_cache            use_cache            true
    bos_token_id         bos_token_id         50256
    eos_token_id         eos_token_id         50256
    pad_token_id         pad_token_id         null
"""
_PHI_FROM_GPTJ = """
    tie_word_embeddings  tie_word_embeddings  false
    hidden_act           activation_function  "gelu_new"
    attention_dropout    attn_pdrop           0.0
    layer_norm_eps       layer_norm_epsilon   1e-05
    resid_pdrop          resid_pdrop          0.0
    embd_pdrop           embd_pdrop           0.0
"""
_BIGCODE_FROM_GPT2 = """
    tie_word_embeddings  tie_word_embeddings  true
    resid_pdrop          resid_pdrop          0.1
    embd_pdrop           embd_pdrop           0.1
    attn_pdrop           attn_pdrop           0.1
    layer_norm_epsilon   layer_norm_epsilon   1e-05
    activation_function  activation_function  "gelu_new"
    n_inner              n_inner              null
"""


def _neox_positions(config: Config, head_dim: int) -> tuple[Any, Any, JsonObject]:
    """The base of GPT-NeoX's rotary positions, the share of a head that they turn, and how they are scaled."""
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(parameters, dict) or any(isinstance(value, dict) for value in parameters.values()):
        raise NoStockClassError("its rotary parameters differ between layers")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in _ROPE_TYPES:
        raise NoStockClassError(f"rotary scaling of type {kind!r} is not known to be computed in the same way")
    theta: Any = parameters.get("rope_theta", config.get("rotary_emb_base", 10000))
    factor: Any = parameters.get("partial_rotary_factor", config.get("rotary_pct", 0.25))
    numbers = all(type(each) in (int, float) and math.isfinite(each) and each > 0 for each in (theta, factor))
    if not numbers or factor > 1:
        raise NoStockClassError(f"a rotary base of {theta!r} on a share of {factor!r} of each head makes no sense")
    rotated = int(head_dim * factor)
    if not rotated or rotated % 2:
        raise NoStockClassError(f"{rotated} rotary dimensions of {head_dim} in a head make no pairs")
    base = {"rope_theta", "partial_rotary_factor", "rope_type", "type"}
    scaling = {key: value for key, value in parameters.items() if key not in base}
    return theta, factor, {} if kind == "default" else {"rope_type": kind} | scaling


def _rotary_decoder(config: Config, theta: Any, scaling: JsonObject) -> JsonObject:
    """The entries that phi and starcoder2 share, besides those of the tables."""
    hidden, heads, layers, inner = _sizes(config)
    pad, vocabulary = config.get("pad_token_id"), config.get("vocab_size")
    if isinstance(pad, int) and isinstance(vocabulary, int) and not -vocabulary <= pad < vocabulary:
        raise NoStockClassError(f"its class needs a padding token inside the vocabulary, and pad_token_id is {pad}")
    return {
        "tokenizer_class": _tokenizer(config),
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "rope_theta": theta,
        "rope_scaling": scaling or None,
        "rope_parameters": {"rope_type": "default"} | scaling | {"rope_theta": theta},
    }


def _phi(config: Config, theta: Any, factor: Any, scaling: JsonObject) -> JsonObject:
    stock = _rotary_decoder(config, theta, scaling)
    stock["rope_parameters"]["partial_rotary_factor"] = factor
    return stock | {"partial_rotary_factor": factor, "qk_layernorm": False}


def _phi_from_neox(config: Config) -> JsonObject:
    hidden, heads, *_ = _sizes(config)
    positions = _neox_positions(config, hidden // heads)
    return entries(config, _NEOX) | entries(config, _PHI_FROM_NEOX) | _phi(config, *positions)


def _phi_from_gptj(config: Config) -> JsonObject:
    hidden, heads, *_ = _sizes(config)
    head_dim, rotated = hidden // heads, config.get("rotary_dim", 64)
    if type(rotated) is not int or not 0 < rotated <= head_dim or rotated % 2:
        raise NoStockClassError(f"rotary_dim = {rotated!r} is no even count of up to {head_dim} dimensions of a head")
    positions = config.get("n_positions", config.get("max_position_embeddings", 2048))
    stock = _phi(config, 10000.0, partial_factor(rotated, head_dim), {}) | {"max_position_embeddings": positions}
    return entries(config, _GPT) | entries(config, _PHI_FROM_GPTJ) | stock


def _phi_from_codegen(config: Config) -> JsonObject:
    heads = count(config, "n_head", "num_attention_heads")
    if heads % 4:
        raise ConfigError(f"config.json has {heads} heads, and codegen needs a multiple of 4: repair the config")
    return _phi_from_gptj(config)


def _starcoder2(config: Config) -> JsonObject:
    hidden, heads, *_ = _sizes(config)
    head_dim = hidden // heads
    theta, factor, scaling = _neox_positions(config, head_dim)
    if int(head_dim * factor) != head_dim:
        raise NoStockClassError(
            f"no stock class with a K/V-head count has sequential blocks and {int(head_dim * factor)} rotary dimensions of "
            f"{head_dim} in a head (in starcoder2 all are rotary)"
        )
    stock = _rotary_decoder(config, theta, scaling) | {"use_bias": True, "sliding_window": None}
    return entries(config, _NEOX) | entries(config, _STARCODER2_FROM_NEOX) | stock


def _gpt_bigcode(config: Config) -> JsonObject:
    if config.get("add_cross_attention"):
        raise NoStockClassError("gpt_bigcode has no cross-attention with a single K/V head")
    hidden, heads, layers, _ = _sizes(config)
    return (
        entries(config, _GPT)
        | entries(config, _BIGCODE_FROM_GPT2)
        | {
            "tokenizer_class": _tokenizer(config),
            "n_embd": hidden,
            "n_head": heads,
            "n_layer": layers,
            "n_positions": config.get("n_positions", config.get("max_position_embeddings", 1024)),
            "num_key_value_heads": heads,
            "add_cross_attention": False,
            "multi_query": False,
            "scale_attn_weights": True,
            "attention_softmax_in_fp32": True,
            "scale_attention_softmax_in_fp32": True,
        }
    )


def _gpt2_query_factor(config: Config, layer: int) -> float:
    """gpt_bigcode has a switch for this scale, which only transformers reads."""
    factor = 1.0
    if not config.get("scale_attn_weights", True):
        factor *= math.sqrt(count(config, "n_embd", "hidden_size") // count(config, "n_head", "num_attention_heads"))
    if config.get("scale_attn_by_inverse_layer_idx"):
        factor /= layer + 1
    return factor


def _neox_biased(config: Config) -> bool:
    """GPT-NeoX may have no attention biases; its MLP always has some."""
    return bool(config.get("attention_bias", True))


PHI_FROM_GPT_NEOX: Final = StockForm(
    model_type="gpt_neox",
    stock="phi",
    condition="`use_parallel_residual` (Pythia, GPT-NeoX-20B)",
    classes={"GPTNeoXForCausalLM": "PhiForCausalLM", "GPTNeoXModel": "PhiModel"},
    config=_phi_from_neox,
    dropped=_DROPPED,
    prefixes=("gpt_neox.", "model."),
    layers=("gpt_neox.layers", "model.layers"),
    before=modules("model.embed_tokens gpt_neox.embed_in never"),
    inside=modules("""
        input_layernorm   input_layernorm            always     neutral
        self_attn.q_proj  attention.query_key_value  attention  roles=query  norm=input_layernorm
        self_attn.k_proj  attention.query_key_value  attention  roles=key    norm=input_layernorm
        self_attn.v_proj  attention.query_key_value  attention  roles=value  norm=input_layernorm
        self_attn.dense   attention.dense            attention
        mlp.fc1           mlp.dense_h_to_4h          always     norm=post_attention_layernorm
        mlp.fc2           mlp.dense_4h_to_h          always
    """),
    behind=modules("""
        model.final_layernorm  gpt_neox.final_layer_norm  always
        lm_head                embed_out|lm_head          zeros
    """),
    fused_layout="grouped",
    attention_biased=_neox_biased,
)
STARCODER2_FROM_GPT_NEOX: Final = replace(
    PHI_FROM_GPT_NEOX,
    stock="starcoder2",
    condition="not `use_parallel_residual`, and rotary positions on whole heads (RedPajama-INCITE)",
    classes={"GPTNeoXForCausalLM": "Starcoder2ForCausalLM", "GPTNeoXModel": "Starcoder2Model"},
    config=_starcoder2,
    inside=modules("""
        input_layernorm           input_layernorm            always
        post_attention_layernorm  post_attention_layernorm   always
        self_attn.q_proj          attention.query_key_value  attention  roles=query
        self_attn.k_proj          attention.query_key_value  attention  roles=key
        self_attn.v_proj          attention.query_key_value  attention  roles=value
        self_attn.o_proj          attention.dense            attention
        mlp.c_fc                  mlp.dense_h_to_4h          always
        mlp.c_proj                mlp.dense_4h_to_h          always
    """),
    behind=modules("""
        model.norm  gpt_neox.final_layer_norm  always
        lm_head     embed_out|lm_head          never
    """),
)
PHI_FROM_GPTJ: Final = StockForm(
    model_type="gptj",
    stock="phi",
    classes={"GPTJForCausalLM": "PhiForCausalLM", "GPTJModel": "PhiModel"},
    config=_phi_from_gptj,
    dropped=_DROPPED,
    prefixes=("transformer.", "model."),
    layers=("transformer.h", "model.layers"),
    before=modules("model.embed_tokens transformer.wte never"),
    inside=modules("""
        input_layernorm   ln_1           always
        self_attn.q_proj  attn.q_proj    zeros  roles=query
        self_attn.k_proj  attn.k_proj    zeros  roles=key
        self_attn.v_proj  attn.v_proj    zeros  roles=value
        self_attn.dense   attn.out_proj  zeros
        mlp.fc1           mlp.fc_in      always
        mlp.fc2           mlp.fc_out     always
    """),
    behind=modules("""
        model.final_layernorm  transformer.ln_f  always
        lm_head                lm_head           optional
    """),
    interleaved=True,
)
PHI_FROM_CODEGEN: Final = replace(
    PHI_FROM_GPTJ,
    model_type="codegen",
    classes={"CodeGenForCausalLM": "PhiForCausalLM", "CodeGenModel": "PhiModel"},
    config=_phi_from_codegen,
    inside=modules("""
        input_layernorm   ln_1           always
        self_attn.q_proj  attn.qkv_proj  zeros  roles=query
        self_attn.k_proj  attn.qkv_proj  zeros  roles=key
        self_attn.v_proj  attn.qkv_proj  zeros  roles=value
        self_attn.dense   attn.out_proj  zeros
        mlp.fc1           mlp.fc_in      always
        mlp.fc2           mlp.fc_out     always
    """),
    fused_layout="quarters",
)
GPT_BIGCODE_FROM_GPT2: Final = StockForm(
    model_type="gpt2",
    stock="gpt_bigcode",
    condition="one K/V head, no cross-attention",
    classes={"GPT2LMHeadModel": "GPTBigCodeForCausalLM", "GPT2Model": "GPTBigCodeModel"},
    config=_gpt_bigcode,
    dropped=_DROPPED,
    prefixes=("transformer.", "transformer."),
    layers=("transformer.h", "transformer.h"),
    before=modules("""
        transformer.wte  transformer.wte  never
        transformer.wpe  transformer.wpe  never
    """),
    inside=modules("""
        ln_1         ln_1         always
        ln_2         ln_2         always
        attn.c_attn  attn.c_attn  always  roles=query,key,value
        attn.c_proj  attn.c_proj  always
        mlp.c_fc     mlp.c_fc     always
        mlp.c_proj   mlp.c_proj   always
    """),
    behind=modules("""
        transformer.ln_f  transformer.ln_f  always
        lm_head           lm_head           never
    """),
    fused_layout="blocks",
    transposed=True,
    query_factor=_gpt2_query_factor,
    special_tokens=("bos_token", "eos_token", "unk_token"),
)

DECODERS: Final = (
    PHI_FROM_GPT_NEOX,
    STARCODER2_FROM_GPT_NEOX,
    PHI_FROM_GPTJ,
    PHI_FROM_CODEGEN,
    GPT_BIGCODE_FROM_GPT2,
)


def stock_form(config: Config, groups: int) -> StockForm:
    """The form of the stock type that computes the same as a source with `groups` K/V heads.

    Raises:
        NoStockClassError: there is none.
    """
    model_type = config.get("model_type")
    if model_type == "gpt_neox" and not config.get("use_parallel_residual", True):
        form = STARCODER2_FROM_GPT_NEOX
    else:
        found = [each for each in DECODERS if each.model_type == model_type]
        if not found:
            raise NoStockClassError(f"no stock class is known to compute what {model_type} does with fewer K/V heads")
        form = found[0]
    if form is GPT_BIGCODE_FROM_GPT2 and groups != 1:
        raise NoStockClassError(
            "gpt_bigcode, which is GPT-2 otherwise, has either one K/V head or as many as query heads"
        )
    if "auto_map" in config:
        raise NoStockClassError(
            f"the checkpoint contains modelling code for {model_type}, which may compute something else"
        )
    return form
