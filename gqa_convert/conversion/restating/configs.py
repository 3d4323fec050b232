"""config.json of a stock type, from that of a type with custom code. Data in, data out; every default is that of
the type's own code.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

from gqa_convert.checkpoint.strict_json import Config, JsonObject
from gqa_convert.errors import ConfigError, UnsupportedFamilyError

Reader = Callable[[Config], JsonObject]

_IGNORED = frozenset(
    {"auto_map", "attn_implementation", "_attn_implementation", "flash_attn", "flash_rotary", "fused_dense"}
)
"""Keys that configure a checkpoint's custom code and must not reach a stock class."""


class Settings:
    """A config from which known keys are taken one by one; the rest is kept unchanged."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._taken: set[str] = set(_IGNORED)

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key, or its default where the key is missing."""
        self._taken.add(key)
        return self._config.get(key, default)

    def count(self, key: str, default: int | None = None) -> int:
        value = self.take(key)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise ConfigError(f"config.json has {key} = {value!r} where a positive integer belongs: repair the config")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.take(key)
        value = default if value is None else value
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise ConfigError(f"config.json has {key} = {value!r} where a positive number belongs: repair the config")
        return float(value) if isinstance(value, float) else value

    def flag(self, key: str, default: bool) -> bool:
        value = self.take(key)
        value = default if value is None else value
        if type(value) is not bool:
            raise ConfigError(f"config.json has {key} = {value!r} where true or false belongs: repair the config")
        return value

    def refuse(self, key: str, reason: str, *, default: bool = False) -> None:
        """Refuse a key that is set."""
        value = self.take(key)
        if default if value is None else value:
            raise _not_stock(f"{key} = {value if value is not None else default!r}: {reason}")

    def rest(self) -> JsonObject:
        return {key: copy.deepcopy(value) for key, value in self._config.items() if key not in self._taken}


def _not_stock(what: str) -> UnsupportedFamilyError:
    return UnsupportedFamilyError(f"no stock class computes the same as this checkpoint, whose config.json has {what}")


def _heads(settings: Settings, key: str = "num_attention_heads", hidden_key: str = "hidden_size") -> tuple[int, int]:
    """hidden_size and the number of query heads."""
    hidden, heads = settings.count(hidden_key), settings.count(key)
    if hidden % heads:
        raise ConfigError(f"config.json has {heads} heads, which do not divide a width of {hidden}: repair the config")
    return hidden, heads


def _positions(theta: float, scaling: JsonObject | None = None, factor: float | None = None) -> JsonObject:
    """Rotary positions under the keys of old and new clients."""
    partial = {} if factor is None else {"partial_rotary_factor": factor}
    parameters = {"rope_type": "default"} | (scaling or {}) | {"rope_theta": theta} | partial
    return {"rope_theta": theta, "rope_scaling": scaling, "rope_parameters": parameters} | partial


def _scaling(settings: Settings) -> JsonObject | None:
    """Linear and dynamic scaling, which custom code and stock classes compute by the same formula."""
    stated = settings.take("rope_scaling")
    if stated is None:
        return None
    kind = stated.get("rope_type", stated.get("type")) if isinstance(stated, dict) else None
    factor: Any = stated.get("factor") if isinstance(stated, dict) else None
    if kind not in ("linear", "dynamic") or type(factor) not in (int, float) or factor < 1 or not math.isfinite(factor):
        raise _not_stock(f"rope_scaling = {stated!r}: its own code may scale positions differently")
    return {"rope_type": kind, "factor": float(factor)}


def _dense(settings: Settings, **fixed: Any) -> JsonObject:
    """The keys that Llama and its relatives share."""
    hidden, heads = _heads(settings)
    settings.take("head_dim")  # the types' own code has hidden_size / heads
    kv_heads = settings.take("num_key_value_heads")
    kv_heads = heads if kv_heads is None else kv_heads
    if type(kv_heads) is not int or kv_heads < 1 or heads % kv_heads:
        raise ConfigError(
            f"config.json has num_key_value_heads = {kv_heads!r}, which does not divide {heads} query heads: repair the config"
        )
    if settings.take("pretraining_tp", 1) not in (None, 1):
        settings.refuse("pretraining_tp", "sliced projections round differently; set it to 1")
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": settings.count("num_hidden_layers"),
        "intermediate_size": settings.count("intermediate_size"),
        "vocab_size": settings.count("vocab_size"),
        "hidden_act": settings.take("hidden_act", "silu"),
    } | fixed


def _all_heads(settings: Settings) -> None:
    """Refuse a K/V-head count in a type whose custom code has none."""
    stated, heads = settings.take("num_key_value_heads"), settings.take("num_attention_heads")
    if stated is not None and stated != heads:
        raise ConfigError(
            f"config.json has num_key_value_heads = {stated!r}, which this type's custom code does not read: remove the key"
        )


def from_yi(config: Config) -> JsonObject:
    settings = Settings(config)
    settings.refuse("rope_scaling", "its own code does not read it")
    dense = _dense(settings, attention_bias=False, rms_norm_eps=settings.number("rms_norm_eps", 1e-5))
    dense |= _positions(settings.number("rope_theta", 5000000.0)) | {
        "tie_word_embeddings": settings.flag("tie_word_embeddings", False)
    }
    return settings.rest() | dense | {"max_position_embeddings": settings.count("max_position_embeddings", 4096)}


def from_open_llama(config: Config) -> JsonObject:
    settings = Settings(config)
    settings.refuse("use_stable_embedding", "a norm stands behind the embedding; no stock class has it", default=True)
    settings.refuse("rope_scaling", "it is not known to be computed alike")
    _all_heads(settings)
    tied = settings.flag("shared_input_output_embedding", True)
    for key in (
        "use_memorry_efficient_attention",
        "use_memory_efficient_attention",
        "attention_dropout_prob",
        "hidden_dropout_prob",
    ):
        settings.take(key)
    settings.take("tie_word_embeddings")
    dense = _dense(
        settings, attention_bias=False, rms_norm_eps=settings.number("rms_norm_eps", 1e-6), tie_word_embeddings=tied
    )
    dense |= _positions(settings.number("rope_theta", 10000.0))
    return settings.rest() | dense | {"max_position_embeddings": settings.count("max_position_embeddings", 2048)}


def from_internlm(config: Config) -> JsonObject:
    settings = Settings(config)
    _all_heads(settings)
    settings.take("bias")  # the tensors say which biases there are
    settings.refuse("rope_scaling", "its own code does not read it")
    rotary = settings.take("rotary")
    rotary = {"base": 10000, "type": "origin"} if rotary is None else rotary
    if not isinstance(rotary, dict) or rotary.get("type") not in ("origin", "dynamic"):
        raise _not_stock(f"rotary = {rotary!r}, which its own code does not know")
    inner = Settings(rotary)
    scaling = (
        {"rope_type": "dynamic", "factor": float(inner.number("scaling_factor", 1.0))}
        if rotary["type"] == "dynamic"
        else None
    )
    dense = _dense(settings, rms_norm_eps=settings.number("rms_norm_eps", 1e-6)) | _positions(
        inner.number("base", 10000.0), scaling
    )
    dense["tie_word_embeddings"] = settings.flag("tie_word_embeddings", False)
    return settings.rest() | dense | {"max_position_embeddings": settings.count("max_position_embeddings", 2048)}


def from_internlm2(config: Config) -> JsonObject:
    settings = Settings(config)
    settings.take("bias")
    dense = _dense(settings, rms_norm_eps=settings.number("rms_norm_eps", 1e-6))
    dense |= _positions(settings.number("rope_theta", 10000.0), _scaling(settings))
    dense["tie_word_embeddings"] = settings.flag("tie_word_embeddings", False)
    return settings.rest() | dense | {"max_position_embeddings": settings.count("max_position_embeddings", 2048)}


def from_baichuan(config: Config) -> JsonObject:
    settings = Settings(config)
    _all_heads(settings)
    positions = config.get("max_position_embeddings")
    if positions is None or config.get("hidden_size") == 5120:
        raise _not_stock(
            "the shape of a 13B Baichuan, which has ALiBi instead of rotary positions: only the 7B can be rewritten"
        )
    settings.refuse("rope_scaling", "its own code does not read it")
    for key in ("_from_model_config", "model_max_length", "z_loss_weight"):
        settings.take(key)
    dense = _dense(settings, attention_bias=False, rms_norm_eps=settings.number("rms_norm_eps", 1e-6)) | _positions(
        10000.0
    )
    settings.take("rope_theta")
    dense["tie_word_embeddings"] = settings.flag("tie_word_embeddings", False)
    return settings.rest() | dense | {"max_position_embeddings": settings.count("max_position_embeddings")}


def from_qwen(config: Config) -> JsonObject:
    settings = Settings(config)
    _all_heads(settings)
    hidden, heads = _heads(settings)
    width = settings.count("kv_channels", 128)
    if width * heads != hidden:
        raise _not_stock(f"kv_channels = {width}, which is not hidden_size / num_attention_heads")
    if settings.number("rotary_pct", 1.0) != 1.0:
        raise _not_stock("a rotary_pct below 1: qwen2 turns whole heads")
    if not settings.flag("no_bias", True):
        raise _not_stock("no_bias = false: qwen2 has biases on queries, keys and values only")
    if not settings.flag("scale_attn_weights", True):
        raise _not_stock("scale_attn_weights = false: qwen2 always scales its scores")
    inner = settings.count("intermediate_size", 22016)
    if inner % 2:
        raise ConfigError(f"config.json has intermediate_size = {inner}, twice the width of the MLP: repair the config")
    # beyond seq_length its own code scales positions (use_dynamic_ntk) and queries (use_logn_attn) by the length of the
    # text
    length = settings.count("seq_length", 8192)
    for key in (
        "max_position_embeddings",
        "use_dynamic_ntk",
        "use_logn_attn",
        "use_flash_attn",
        "use_cache_quantization",
        "use_cache_kernel",
        "softmax_in_fp32",
        "bf16",
        "fp16",
        "fp32",
        "onnx_safe",
        "attn_dropout_prob",
        "emb_dropout_prob",
        "rope_theta",
        "rope_scaling",
    ):
        settings.take(key)
    return settings.rest() | {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": inner // 2,
        "num_hidden_layers": settings.count("num_hidden_layers"),
        "vocab_size": settings.count("vocab_size"),
        "hidden_act": "silu",
        "rms_norm_eps": settings.number("layer_norm_epsilon", 1e-6),
        "max_position_embeddings": length,
        "use_sliding_window": False,
        "tie_word_embeddings": settings.flag("tie_word_embeddings", False),
        **_positions(settings.number("rotary_emb_base", 10000.0)),
    }


def from_stablelm_epoch(config: Config) -> JsonObject:
    settings = Settings(config)
    settings.refuse("rope_scaling", "its own code does not read it")
    for key in ("use_qkv_bias", "num_heads"):
        settings.take(key)
    for key in ("qk_layernorm", "use_parallel_residual"):
        settings.refuse(
            key, "the code that goes by this type does not read it: the checkpoint is a stablelm, change model_type"
        )
    if settings.number("rotary_scaling_factor", 1.0) != 1.0:
        raise _not_stock("a rotary_scaling_factor other than 1")
    dense = _dense(
        settings, layer_norm_eps=settings.number("norm_eps", 1e-5), qk_layernorm=False, use_parallel_residual=False
    )
    factor = settings.number("rope_pct", 0.25)
    rotated = int(dense["hidden_size"] // dense["num_attention_heads"] * factor)
    if factor > 1 or rotated < 2 or rotated % 2:
        raise _not_stock(f"rope_pct = {factor}, which leaves no pairs to turn")
    dense |= _positions(settings.number("rope_theta", 10000.0), None, factor)
    dense["tie_word_embeddings"] = settings.flag("tie_word_embeddings", False)
    return settings.rest() | dense | {"max_position_embeddings": settings.count("max_position_embeddings", 4096)}


def from_minicpm(config: Config) -> JsonObject:
    settings = Settings(config)
    settings.refuse("num_experts", "granite has no experts; granitemoe routes differently")
    settings.refuse("sparse_config", "its sparse attention selects blocks of keys")
    settings.take("attention_bias")  # the tensors say whether there are biases
    dense = _dense(settings, rms_norm_eps=settings.number("rms_norm_eps", 1e-6), mlp_bias=False)
    hidden, layers = dense["hidden_size"], dense["num_hidden_layers"]
    dense |= _positions(settings.number("rope_theta", 10000.0), _scaling(settings)) | {
        "embedding_multiplier": settings.number("scale_emb", 1),
        "residual_multiplier": settings.number("scale_depth", 1) / math.sqrt(layers),
        "attention_multiplier": 1 / math.sqrt(hidden // dense["num_attention_heads"]),
        "logits_scaling": hidden / settings.number("dim_model_base", 1),
        "tie_word_embeddings": settings.flag("tie_word_embeddings", True),
    }
    return settings.rest() | dense | {"max_position_embeddings": settings.count("max_position_embeddings", 2048)}


def from_phi_msft(config: Config) -> JsonObject:
    settings = Settings(config)
    hidden, heads = _heads(settings, "n_head", "n_embd")
    kv_heads = settings.take("n_head_kv")
    kv_heads = heads if kv_heads is None else kv_heads
    if type(kv_heads) is not int or kv_heads < 1 or heads % kv_heads:
        raise ConfigError(
            f"config.json has n_head_kv = {kv_heads!r}, which does not divide {heads} query heads: repair the config"
        )
    width = hidden // heads
    rotated = min(settings.count("rotary_dim", 32), width)
    if rotated % 2:
        raise _not_stock(f"rotary_dim = {rotated}, which leaves no pairs to turn")
    factor = rotated / width
    factor = factor if int(width * factor) == rotated else math.nextafter(factor, 1.0)
    inner = settings.take("n_inner")
    for key in ("num_key_value_heads", "architectures"):
        settings.take(key)
    return settings.rest() | {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 4 * hidden if inner is None else inner,
        "num_hidden_layers": settings.count("n_layer"),
        "vocab_size": settings.count("vocab_size"),
        "hidden_act": settings.take("activation_function", "gelu_new") or "gelu_new",
        "layer_norm_eps": settings.number("layer_norm_epsilon", 1e-5),
        "max_position_embeddings": settings.count("n_positions", 2048),
        "qk_layernorm": False,
        "attention_dropout": settings.take("attn_pdrop", 0.0),
        "resid_pdrop": config.get("resid_pdrop", 0.0),
        "embd_pdrop": config.get("embd_pdrop", 0.0),
        "tie_word_embeddings": settings.flag("tie_word_embeddings", False),
        **_positions(10000.0, None, factor),
    }


def from_refined_web(config: Config) -> JsonObject:
    """Falcon as first published: `RefinedWeb` is the architecture of the 40B, `RefinedWebModel` that of the 7B
    and the 1B.
    """
    settings = Settings(config)
    large = settings.take("model_type") == "RefinedWeb"
    hidden, heads = _heads(settings, "n_head")
    common = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": settings.count("n_layer"),
        "alibi": settings.flag("alibi", False),
        "bias": settings.flag("bias", False),
        "vocab_size": settings.count("vocab_size"),
        "new_decoder_architecture": large,
        "rope_theta": 10000.0,
    }
    if settings.take("apply_residual_connection_post_layernorm"):
        raise _not_stock(
            "apply_residual_connection_post_layernorm = true, which falcon's stock class computes in some shapes only"
        )
    if large:
        kv_heads = settings.count("n_head_kv", heads)
        if heads % kv_heads:
            raise ConfigError(
                f"config.json has n_head_kv = {kv_heads}, which does not divide {heads} query heads: repair the config"
            )
        settings.take("multi_query")
        if not settings.flag("parallel_attn", True):
            raise _not_stock("parallel_attn = false: the 40B's blocks are parallel")
        return settings.rest() | common | {"num_kv_heads": kv_heads, "multi_query": True, "parallel_attn": True}
    settings.take("n_head_kv")
    return (
        settings.rest()
        | common
        | {
            "multi_query": settings.flag("multi_query", False),
            "parallel_attn": settings.flag("parallel_attn", False),
        }
    )
