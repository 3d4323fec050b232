"""Model types of 2023 that load by the code in their checkpoints, as the stock types that compute the same.

Each has a table of its modules, and a function from its config to the stock one. Every default is that of its own code.
"""

import math
from collections.abc import Callable
from typing import Any, Final

from gqa_convert.checkpoint.strict_json import Config, JsonObject
from gqa_convert.conversion.rewriting.decoders import partial_factor
from gqa_convert.conversion.rewriting.stock_form import NoStockClassError, StockForm, entries, modules
from gqa_convert.errors import ConfigError
from gqa_convert.families.refusals import RESTATED as STOCK_TYPES


def _refuse(config: Config, **reasons: str) -> None:
    """Refuse keys that are set."""
    for key, reason in reasons.items():
        if config.get(key):
            raise NoStockClassError(f"{key} = {config[key]!r}: {reason}")


def _positions(theta: float, scaling: JsonObject | None = None, factor: float | None = None) -> JsonObject:
    """Rotary positions under the keys of old and new clients."""
    partial = {} if factor is None else {"partial_rotary_factor": factor}
    parameters = {"rope_type": "default"} | (scaling or {}) | {"rope_theta": theta} | partial
    return {"rope_theta": theta, "rope_scaling": scaling, "rope_parameters": parameters} | partial


def _kv_heads(config: Config, key: str, heads: int) -> int:
    value = heads if config.get(key) is None else config[key]
    if type(value) is not int or value < 1 or heads % value:
        raise ConfigError(
            f"config.json has {key} = {value!r}, which does not divide {heads} query heads: repair the config"
        )
    return value


_LLAMA_ENTRIES = """
    hidden_size              hidden_size              count
    num_attention_heads      num_attention_heads      count
    num_hidden_layers        num_hidden_layers        count
    intermediate_size        intermediate_size        count
    vocab_size               vocab_size               count
    hidden_act               hidden_act               "silu"
    rms_norm_eps             rms_norm_eps             1e-06
    tie_word_embeddings      tie_word_embeddings      false
    max_position_embeddings  max_position_embeddings  2048
"""
_PHI_ENTRIES = """
    hidden_size              n_embd               count
    num_attention_heads      n_head               count
    num_hidden_layers        n_layer              count
    vocab_size               vocab_size           count
    hidden_act               activation_function  "gelu_new"
    layer_norm_eps           layer_norm_epsilon   1e-05
    max_position_embeddings  n_positions          2048
    attention_dropout        attn_pdrop           0.0
    resid_pdrop              resid_pdrop          0.0
    embd_pdrop               embd_pdrop           0.0
    tie_word_embeddings      tie_word_embeddings  false
"""
_FALCON_ENTRIES = """
    hidden_size          hidden_size    count
    num_attention_heads  n_head         count
    num_hidden_layers    n_layer        count
    vocab_size           vocab_size     count
    alibi                alibi          false
    bias                 bias           false
    multi_query          multi_query    false
    parallel_attn        parallel_attn  false
"""
_UNREAD = "its own code does not read it"


def _dense(config: Config, *, all_heads: bool = False) -> JsonObject:
    """The keys that Llama and its relatives share.

    Args:
        config: the source's.
        all_heads: whether the type's own code reads no K/V-head count.
    """
    dense = entries(config, _LLAMA_ENTRIES)
    kv_heads = _kv_heads(config, "num_key_value_heads", dense["num_attention_heads"])
    if all_heads and kv_heads != dense["num_attention_heads"]:
        raise ConfigError(
            f"config.json has num_key_value_heads = {kv_heads}, which this type's custom code does not read: remove the key"
        )
    if config.get("pretraining_tp") not in (None, 1):
        _refuse(config, pretraining_tp="sliced projections round differently; set it to 1")
    return dense | {"num_key_value_heads": kv_heads}


def _yi(config: Config) -> JsonObject:
    _refuse(config, rope_scaling=_UNREAD)
    stated = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, **config}
    return _dense(stated) | _positions(config.get("rope_theta", 5000000.0))


def _open_llama(config: Config) -> JsonObject:
    _refuse(config, rope_scaling="it is not known to be computed alike")
    if config.get("use_stable_embedding") is not False:
        raise NoStockClassError("use_stable_embedding: a norm stands behind the embedding; no stock class has it")
    tied = {"tie_word_embeddings": config.get("shared_input_output_embedding", True)}
    return _dense(config, all_heads=True) | tied | _positions(config.get("rope_theta", 10000.0))


def _internlm(config: Config) -> JsonObject:
    _refuse(config, rope_scaling=_UNREAD)
    rotary = config.get("rotary") or {"type": "origin"}
    if not isinstance(rotary, dict) or rotary.get("type") not in ("origin", "dynamic"):
        raise NoStockClassError(f"rotary = {rotary!r}, which its own code does not know")
    scaling = None
    if rotary["type"] == "dynamic":
        scaling = {"rope_type": "dynamic", "factor": float(rotary.get("scaling_factor", 1.0))}
    return _dense(config, all_heads=True) | _positions(rotary.get("base", 10000.0), scaling)


def _scaled(config: Config) -> JsonObject:
    """The keys of InternLM2 and MiniCPM, whose custom code scales positions by the formulas of stock classes."""
    stated, scaling = config.get("rope_scaling"), None
    if stated is not None:
        kind = stated.get("rope_type", stated.get("type")) if isinstance(stated, dict) else None
        if kind not in ("linear", "dynamic"):
            raise NoStockClassError(f"rope_scaling = {stated!r}: its own code may scale positions differently")
        scaling = {"rope_type": kind, "factor": float(stated.get("factor", 1.0))}
    return _dense(config) | _positions(config.get("rope_theta", 10000.0), scaling)


def _baichuan(config: Config) -> JsonObject:
    _refuse(config, rope_scaling=_UNREAD)
    if config.get("max_position_embeddings") is None or config.get("hidden_size") == 5120:
        raise NoStockClassError(
            "the shape of a 13B Baichuan, which has ALiBi instead of rotary positions: only the 7B can be rewritten"
        )
    return _dense(config, all_heads=True) | {"attention_bias": False} | _positions(10000.0)


def _qwen(config: Config) -> JsonObject:
    """Beyond `seq_length` its own code scales positions (use_dynamic_ntk) and queries (use_logn_attn) by the length of
    the text.
    """
    known = {
        "intermediate_size": config.get("intermediate_size", 22016) // 2,
        "rms_norm_eps": config.get("layer_norm_epsilon", 1e-6),
        "max_position_embeddings": config.get("seq_length", 8192),
    }
    dense = _dense({**config, **known}, all_heads=True) | {"use_sliding_window": False}
    width = dense["hidden_size"] // dense["num_attention_heads"]
    for key, value in {"kv_channels": width, "rotary_pct": 1.0, "no_bias": True, "scale_attn_weights": True}.items():
        if config.get(key, value) != value:
            raise NoStockClassError(f"{key} = {config[key]!r}, where qwen2 has {value!r}")
    return dense | _positions(config.get("rotary_emb_base", 10000.0))


def _stablelm_epoch(config: Config) -> JsonObject:
    other = "the code that goes by this type does not read it: the checkpoint is a stablelm, change model_type"
    _refuse(config, rope_scaling=_UNREAD, qk_layernorm=other, use_parallel_residual=other)
    if config.get("rotary_scaling_factor", 1.0) != 1.0:
        raise NoStockClassError("a rotary_scaling_factor other than 1")
    dense = _dense({"max_position_embeddings": 4096, **config})
    del dense["rms_norm_eps"]
    norms = {"layer_norm_eps": config.get("norm_eps", 1e-5), "qk_layernorm": False, "use_parallel_residual": False}
    return dense | norms | _positions(config.get("rope_theta", 10000.0), None, config.get("rope_pct", 0.25))


def _minicpm(config: Config) -> JsonObject:
    _refuse(
        config,
        num_experts="granite has no experts; granitemoe routes differently",
        sparse_config="its sparse attention selects blocks of keys",
    )
    dense = _scaled({"tie_word_embeddings": True, **config}) | {"mlp_bias": False}
    hidden = dense["hidden_size"]
    return dense | {
        "embedding_multiplier": config.get("scale_emb", 1),
        "residual_multiplier": config.get("scale_depth", 1) / math.sqrt(dense["num_hidden_layers"]),
        "attention_multiplier": 1 / math.sqrt(hidden // dense["num_attention_heads"]),
        "logits_scaling": hidden / config.get("dim_model_base", 1),
    }


def _phi_msft(config: Config) -> JsonObject:
    stock = entries(config, _PHI_ENTRIES)
    hidden, heads, inner = stock["hidden_size"], stock["num_attention_heads"], config.get("n_inner")
    rotated = min(config.get("rotary_dim", 32), hidden // heads)
    stock["num_key_value_heads"] = _kv_heads(config, "n_head_kv", heads)
    stock["intermediate_size"] = 4 * hidden if inner is None else inner
    stock["qk_layernorm"] = False
    return stock | _positions(10000.0, None, partial_factor(rotated, hidden // heads))


def _refined_web(config: Config) -> JsonObject:
    """Falcon as first published: `RefinedWeb` is the architecture of the 40B, `RefinedWebModel` that of the 7B and the
    1B.
    """
    _refuse(config, apply_residual_connection_post_layernorm="falcon's stock class computes it in some shapes only")
    stock = entries(config, _FALCON_ENTRIES) | {"new_decoder_architecture": False, "rope_theta": 10000.0}
    if config["model_type"] == "RefinedWebModel":
        return stock
    if config.get("parallel_attn", True) is not True:
        raise NoStockClassError("parallel_attn = false: the 40B's blocks are parallel")
    kv_heads = _kv_heads(config, "n_head_kv", stock["num_attention_heads"])
    large = {"new_decoder_architecture": True, "multi_query": True, "parallel_attn": True, "num_kv_heads": kv_heads}
    return stock | large


_IGNORED = (
    "auto_map attn_implementation _attn_implementation flash_attn flash_rotary fused_dense head_dim pretraining_tp"
)
"""Keys that configure a checkpoint's custom code and must not reach a stock class."""

_DROPPED: Final = {
    "open_llama": """
        shared_input_output_embedding use_stable_embedding use_memorry_efficient_attention use_memory_efficient_attention
        attention_dropout_prob hidden_dropout_prob
    """,
    "internlm": "bias rotary",
    "internlm2": "bias",
    "baichuan": "_from_model_config model_max_length z_loss_weight",
    "qwen": """
        kv_channels layer_norm_epsilon rotary_emb_base rotary_pct no_bias scale_attn_weights seq_length use_dynamic_ntk
        use_logn_attn use_flash_attn use_cache_quantization use_cache_kernel softmax_in_fp32 bf16 fp16 fp32 onnx_safe
        attn_dropout_prob emb_dropout_prob
    """,
    "stablelm_epoch": "use_qkv_bias num_heads rotary_scaling_factor norm_eps rope_pct",
    "minicpm": "num_experts sparse_config attention_bias scale_emb scale_depth dim_model_base",
    "phi-msft": """
        n_embd n_head n_head_kv n_inner n_layer n_positions rotary_dim activation_function layer_norm_epsilon attn_pdrop
    """,
    "RefinedWeb": "n_head n_layer n_head_kv apply_residual_connection_post_layernorm",
    "RefinedWebModel": "n_head n_layer n_head_kv apply_residual_connection_post_layernorm",
}


def _remote(model_type: str, config: Callable[[Config], JsonObject], classes: str, **fields: Any) -> StockForm:
    """The form of a type.

    Args:
        model_type: the type.
        config: as in `StockForm`.
        classes: names of the source's classes and, last, of the stock class.
        fields: of `StockForm`.
    """
    *own, stock = classes.split()
    return StockForm(
        model_type=model_type,
        stock=STOCK_TYPES[model_type],
        classes=dict.fromkeys(own, stock),
        config=config,
        dropped=frozenset(f"{_IGNORED} {_DROPPED.get(model_type, '')}".split()),
        **fields,
    )


_BEFORE = modules("model.embed_tokens model.embed_tokens never")
_BEHIND = modules("""
    model.norm  model.norm  never
    lm_head     lm_head     never
""")
_MLP = modules("""
    mlp.gate_proj  mlp.gate_proj  never
    mlp.up_proj    mlp.up_proj    never
    mlp.down_proj  mlp.down_proj  never
""")
_NORMS = modules("""
    input_layernorm           input_layernorm           never
    post_attention_layernorm  post_attention_layernorm  never
""")
_ATTENTION = modules("""
    self_attn.q_proj  self_attn.q_proj  attention
    self_attn.k_proj  self_attn.k_proj  attention
    self_attn.v_proj  self_attn.v_proj  attention
    self_attn.o_proj  self_attn.o_proj  attention
""")
_LLAMA: Final[dict[str, Any]] = {
    "before": _BEFORE,
    "behind": _BEHIND,
    "inside": (*_ATTENTION, *_MLP, *_NORMS),
    "bias_key": "attention_bias",
}
"""The modules of Llama, under its own names."""

REMOTE_CODE: Final = {
    form.model_type: form
    for form in (
        _remote(
            "Yi",
            _yi,
            "YiForCausalLM LlamaForCausalLM",
            before=_BEFORE,
            inside=(
                *_ATTENTION,
                *_MLP,
                *modules("""
                    input_layernorm           ln1|input_layernorm           never
                    post_attention_layernorm  ln2|post_attention_layernorm  never
                """),
            ),
            behind=_BEHIND,
            bias_key="attention_bias",
        ),
        _remote("open_llama", _open_llama, "OpenLlamaForCausalLM LlamaForCausalLM", **_LLAMA),
        _remote("internlm", _internlm, "InternLMForCausalLM LlamaForCausalLM", **_LLAMA),
        _remote("minicpm", _minicpm, "MiniCPMForCausalLM GraniteForCausalLM", **_LLAMA),
        _remote(
            "internlm2",
            _scaled,
            "InternLM2ForCausalLM LlamaForCausalLM",
            before=modules("model.embed_tokens model.tok_embeddings never"),
            inside=modules("""
                self_attn.q_proj          attention.wqkv   attention  roles=query
                self_attn.k_proj          attention.wqkv   attention  roles=key
                self_attn.v_proj          attention.wqkv   attention  roles=value
                self_attn.o_proj          attention.wo     attention
                mlp.gate_proj             feed_forward.w1  never
                mlp.up_proj               feed_forward.w3  never
                mlp.down_proj             feed_forward.w2  never
                input_layernorm           attention_norm   never
                post_attention_layernorm  ffn_norm         never
            """),
            behind=modules("""
                model.norm  model.norm  never
                lm_head     output      never
            """),
            fused_layout="grouped",
            bias_key="attention_bias",
        ),
        _remote(
            "baichuan",
            _baichuan,
            "BaiChuanForCausalLM BaichuanForCausalLM LlamaForCausalLM",
            before=_BEFORE,
            inside=(
                *modules("""
                    self_attn.q_proj  self_attn.W_pack  never  roles=query
                    self_attn.k_proj  self_attn.W_pack  never  roles=key
                    self_attn.v_proj  self_attn.W_pack  never  roles=value
                    self_attn.o_proj  self_attn.o_proj  never
                """),
                *_MLP,
                *_NORMS,
            ),
            behind=_BEHIND,
            fused_layout="blocks",
            unit_head=("NormHead", 125696),
        ),
        _remote(
            "qwen",
            _qwen,
            "QWenLMHeadModel Qwen2ForCausalLM",
            layers=("transformer.h", "model.layers"),
            before=modules("model.embed_tokens transformer.wte never"),
            inside=modules("""
                self_attn.q_proj          attn.c_attn  always  roles=query
                self_attn.k_proj          attn.c_attn  always  roles=key
                self_attn.v_proj          attn.c_attn  always  roles=value
                self_attn.o_proj          attn.c_proj  never
                mlp.gate_proj             mlp.w2       never
                mlp.up_proj               mlp.w1       never
                mlp.down_proj             mlp.c_proj   never
                input_layernorm           ln_1         never
                post_attention_layernorm  ln_2         never
            """),
            behind=modules("""
                model.norm  transformer.ln_f  never
                lm_head     lm_head           never
            """),
            fused_layout="blocks",
            alike_up_to="seq_length",
        ),
        _remote(
            "stablelm_epoch",
            _stablelm_epoch,
            "StableLMEpochForCausalLM StableLmForCausalLM",
            before=_BEFORE,
            inside=modules("""
                self_attn.q_proj          self_attn.q_proj          attention
                self_attn.k_proj          self_attn.k_proj          attention
                self_attn.v_proj          self_attn.v_proj          attention
                self_attn.o_proj          self_attn.o_proj          never
                mlp.gate_proj             mlp.gate_proj             never
                mlp.up_proj               mlp.up_proj               never
                mlp.down_proj             mlp.down_proj             never
                input_layernorm           input_layernorm           always
                post_attention_layernorm  post_attention_layernorm  always
            """),
            behind=modules("""
                model.norm  model.norm  always
                lm_head     lm_head     never
            """),
            bias_key="use_qkv_bias",
        ),
        _remote(
            "phi-msft",
            _phi_msft,
            "PhiForCausalLM PhiForCausalLM",
            layers=("transformer.h", "model.layers"),
            before=modules("model.embed_tokens transformer.embd.wte never"),
            inside=modules("""
                self_attn.q_proj  mixer.Wqkv      always  roles=query
                self_attn.k_proj  mixer.Wqkv      always  roles=key
                self_attn.v_proj  mixer.Wqkv      always  roles=value
                self_attn.dense   mixer.out_proj  always
                mlp.fc1           mlp.fc1         always
                mlp.fc2           mlp.fc2         always
                input_layernorm   ln              always
            """),
            behind=modules("""
                model.final_layernorm  lm_head.ln      always
                lm_head                lm_head.linear  always
            """),
            fused_layout="blocks",
        ),
        _remote("RefinedWeb", _refined_web, "RWForCausalLM FalconForCausalLM FalconForCausalLM"),
        _remote("RefinedWebModel", _refined_web, "RWForCausalLM FalconForCausalLM FalconForCausalLM"),
    )
}
"""All forms by model type."""
