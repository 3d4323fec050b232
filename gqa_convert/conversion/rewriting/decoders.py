"""GPT-NeoX, GPT-J, CodeGen and GPT-2 as stock types that have a K/V-head count: tables, and the conditions under which
they compute the same.
"""

import math
from dataclasses import replace
from typing import Final

from gqa_convert.checkpoint.strict_json import Config, JsonObject
from gqa_convert.conversion.rewriting.stock_form import NoStockClassError, StockForm, modules, refused_value

_ROPE_TYPES = frozenset({"default", "linear", "dynamic", "yarn", "longrope", "llama3"})
"""Kinds of rotary scaling that source and stock class compute with the same function of transformers."""


def partial_factor(rotated: int, head_dim: int) -> float:
    """The share from which software computes `rotated` as int(head_dim * share)."""
    factor = rotated / head_dim
    return factor if int(head_dim * factor) == rotated else math.nextafter(factor, 1.0)


def _check_padding(stock: JsonObject) -> None:
    """Check that the stock class's embedding can have the padding token."""
    pad, vocabulary = stock["pad_token_id"], stock["vocab_size"]
    if isinstance(pad, int) and not -vocabulary <= pad < vocabulary:
        raise refused_value("pad_token_id", pad)


def _phi_from_neox(config: Config, stock: JsonObject) -> JsonObject:
    _check_padding(stock)
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(parameters, dict) or any(isinstance(value, dict) for value in parameters.values()):
        raise refused_value("rope_parameters", parameters)
    further = dict(parameters)
    kind = further.pop("type", "default")
    kind = further.pop("rope_type", kind)
    theta = further.pop("rope_theta", config.get("rotary_emb_base", 10000))
    factor = further.pop("partial_rotary_factor", config.get("rotary_pct", 0.25))
    if kind not in _ROPE_TYPES:
        raise refused_value("rope_type", kind)
    if type(theta) not in (int, float) or type(factor) not in (int, float) or theta <= 0 or not 0 < factor <= 1:
        raise NoStockClassError(f"a rotary base of {theta!r} on a share of {factor!r} of each head makes no sense")
    head_dim = stock["hidden_size"] // stock["num_attention_heads"]
    rotated = int(head_dim * factor)
    if not rotated or rotated % 2:
        raise NoStockClassError(f"{rotated} rotary dimensions of {head_dim} in a head make no pairs")
    scaling = None if kind == "default" else {"rope_type": kind} | further
    return {"rope_theta": theta, "rope_scaling": scaling, "partial_rotary_factor": factor}


def _starcoder2_from_neox(config: Config, stock: JsonObject) -> JsonObject:
    positions = _phi_from_neox(config, stock)
    head_dim = stock["hidden_size"] // stock["num_attention_heads"]
    rotated = int(head_dim * positions.pop("partial_rotary_factor"))
    if rotated != head_dim:
        raise NoStockClassError(
            f"no stock class with a K/V-head count has sequential blocks and {rotated} rotary dimensions of {head_dim} in a "
            "head (in starcoder2 all are rotary)"
        )
    return positions


def _phi_from_gptj(config: Config, stock: JsonObject) -> JsonObject:
    _check_padding(stock)
    head_dim, rotated = stock["hidden_size"] // stock["num_attention_heads"], config.get("rotary_dim", 64)
    if type(rotated) is not int or not 0 < rotated <= head_dim or rotated % 2:
        raise refused_value("rotary_dim", rotated)
    inner = stock["intermediate_size"] or 4 * stock["hidden_size"]
    return {"intermediate_size": inner, "partial_rotary_factor": partial_factor(rotated, head_dim)}


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
    hidden_size              hidden_size              count
    intermediate_size        intermediate_size        count
    num_hidden_layers        num_hidden_layers        count
    num_attention_heads      num_attention_heads      count
    num_key_value_heads      -                        count=num_attention_heads
"""
_GPT = """
    vocab_size         vocab_size         count
    initializer_range  initializer_range  0.02
    use_cache          use_cache          true
    bos_token_id       bos_token_id       50256
    eos_token_id       eos_token_id       50256
    pad_token_id       pad_token_id       null
"""
_PHI_FROM_GPT = """
    tie_word_embeddings      tie_word_embeddings  false
    hidden_act               activation_function  "gelu_new"
    attention_dropout        attn_pdrop           0.0
    layer_norm_eps           layer_norm_epsilon   1e-05
    resid_pdrop              resid_pdrop          0.0
    embd_pdrop               embd_pdrop           0.0
    hidden_size              n_embd               count
    intermediate_size        n_inner              null
    num_hidden_layers        n_layer              count
    num_attention_heads      n_head               count
    num_key_value_heads      -                    count=num_attention_heads
    rope_theta               -                    10000.0
    max_position_embeddings  n_positions          2048
    qk_layernorm             -                    false
"""

PHI_FROM_GPT_NEOX: Final = StockForm(
    model_type="gpt_neox",
    stock="phi",
    condition="`use_parallel_residual` (Pythia, GPT-NeoX-20B)",
    classes={"GPTNeoXForCausalLM": "PhiForCausalLM", "GPTNeoXModel": "PhiModel"},
    tokenizer="GPTNeoXTokenizerFast",
    config=_NEOX
    + """
    layer_norm_eps  layer_norm_eps  1e-05
    resid_pdrop     hidden_dropout  0.0
    embd_pdrop      hidden_dropout  0.0
    qk_layernorm    -               false
    """,
    further=_phi_from_neox,
    modules=modules("""
        model.embed_tokens       gpt_neox.embed_in
        .input_layernorm         input_layernorm            norm=folded
        .self_attn.{q,k,v}_proj  attention.query_key_value  bias                           norm=input_layernorm
        .self_attn.dense         attention.dense            bias
        .mlp.fc1                 mlp.dense_h_to_4h          norm=post_attention_layernorm
        .mlp.fc2                 mlp.dense_4h_to_h
        model.final_layernorm    gpt_neox.final_layer_norm
        lm_head                  embed_out|lm_head          bias
    """),
    prefix="gpt_neox.",
    layers=("gpt_neox.layers", "model.layers"),
    fused_layout="grouped",
)
STARCODER2_FROM_GPT_NEOX: Final = replace(
    PHI_FROM_GPT_NEOX,
    stock="starcoder2",
    condition="not `use_parallel_residual`, and rotary positions on whole heads (RedPajama-INCITE)",
    classes={"GPTNeoXForCausalLM": "Starcoder2ForCausalLM", "GPTNeoXModel": "Starcoder2Model"},
    config=_NEOX
    + """
    norm_epsilon       layer_norm_eps  1e-05
    residual_dropout   hidden_dropout  0.0
    embedding_dropout  hidden_dropout  0.0
    use_bias           -               true
    sliding_window     -               null
    """,
    further=_starcoder2_from_neox,
    modules=modules("""
        model.embed_tokens         gpt_neox.embed_in
        .input_layernorm           input_layernorm
        .post_attention_layernorm  post_attention_layernorm
        .self_attn.{q,k,v}_proj    attention.query_key_value  bias
        .self_attn.o_proj          attention.dense            bias
        .mlp.c_fc                  mlp.dense_h_to_4h
        .mlp.c_proj                mlp.dense_4h_to_h
        model.norm                 gpt_neox.final_layer_norm
        lm_head                    embed_out|lm_head
    """),
)
_GPTJ_MODULES = """
    model.embed_tokens     transformer.wte
    .input_layernorm       ln_1
    .self_attn.q_proj      attn.q_proj       bias  query
    .self_attn.k_proj      attn.k_proj       bias  key
    .self_attn.v_proj      attn.v_proj       bias
    .self_attn.dense       attn.out_proj     bias
    .mlp.fc1               mlp.fc_in
    .mlp.fc2               mlp.fc_out
    model.final_layernorm  transformer.ln_f
    lm_head                lm_head           bias
"""
PHI_FROM_GPTJ: Final = StockForm(
    model_type="gptj",
    stock="phi",
    classes={"GPTJForCausalLM": "PhiForCausalLM", "GPTJModel": "PhiModel"},
    tokenizer="GPT2Tokenizer",
    config=_GPT + _PHI_FROM_GPT,
    further=_phi_from_gptj,
    modules=modules(_GPTJ_MODULES),
    prefix="transformer.",
    layers=("transformer.h", "model.layers"),
    interleaved=True,
)
PHI_FROM_CODEGEN: Final = replace(
    PHI_FROM_GPTJ,
    model_type="codegen",
    classes={"CodeGenForCausalLM": "PhiForCausalLM", "CodeGenModel": "PhiModel"},
    modules=modules(
        _GPTJ_MODULES
        + """
        .self_attn.{q,k,v}_proj  attn.qkv_proj  bias
        """
    ),
    fused_layout="quarters",
)
GPT_BIGCODE_FROM_GPT2: Final = StockForm(
    model_type="gpt2",
    stock="gpt_bigcode",
    condition="one K/V head, no cross-attention, scores scaled by the width of a head alone",
    classes={"GPT2LMHeadModel": "GPTBigCodeForCausalLM", "GPT2Model": "GPTBigCodeModel"},
    tokenizer="GPT2Tokenizer",
    config=_GPT
    + """
    tie_word_embeddings              tie_word_embeddings  true
    resid_pdrop                      resid_pdrop          0.1
    embd_pdrop                       embd_pdrop           0.1
    attn_pdrop                       attn_pdrop           0.1
    layer_norm_epsilon               layer_norm_epsilon   1e-05
    activation_function              activation_function  "gelu_new"
    n_inner                          n_inner              null
    n_embd                           n_embd               count
    n_head                           n_head               count
    n_layer                          n_layer              count
    n_positions                      n_positions          1024
    num_key_value_heads              -                    count=n_head
    add_cross_attention              -                    false
    multi_query                      -                    false
    scale_attn_weights               -                    true
    attention_softmax_in_fp32        -                    true
    scale_attention_softmax_in_fp32  -                    true
    """,
    only="""
    add_cross_attention              false
    scale_attn_weights               true
    scale_attn_by_inverse_layer_idx  false
    """,
    modules=modules("""
        transformer.wte   transformer.wte
        transformer.wpe   transformer.wpe
        .ln_1             ln_1
        .ln_2             ln_2
        .attn.c_attn      attn.c_attn       query,key,value
        .attn.c_proj      attn.c_proj
        .mlp.c_fc         mlp.c_fc
        .mlp.c_proj       mlp.c_proj
        transformer.ln_f  transformer.ln_f
        lm_head           lm_head
    """),
    prefix="transformer.",
    layers=("transformer.h", "transformer.h"),
    fused_layout="blocks",
    transposed=True,
    tokenizer_defaults=dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
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
    model_type = config["model_type"]
    if "auto_map" in config:
        raise NoStockClassError(
            f"the checkpoint contains modelling code for {model_type}, which may compute something else"
        )
    if model_type == "gpt2" and groups != 1:
        raise NoStockClassError(
            "gpt_bigcode, which is GPT-2 otherwise, has either one K/V head or as many as query heads"
        )
    if model_type == "gpt_neox" and not config.get("use_parallel_residual", True):
        return STARCODER2_FROM_GPT_NEOX
    for form in DECODERS:
        if form.model_type == model_type:
            return form
    raise NoStockClassError(f"no stock class is known to compute what {model_type} does with fewer K/V heads")
