"""Conditions under which a stock type computes what a source does, and config entries, that no table can state."""

import math

from gqa_convert.checkpoint.strict_json import Config, JsonObject

_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
"""Kinds of rotary scaling that source and stock class compute with the same function of transformers."""


class NoStockClassError(Exception):
    """No stock class computes the same as a source.

    Args:
        reason: ends the sentence "no stock class computes the same: ".
    """


def refused_value(key: str, value: object) -> NoStockClassError:
    """The error for a config value with which the source computes something that the stock class does not."""
    return NoStockClassError(f"{key} = {value!r}, with which no stock class is known to compute the same")


def partial_factor(rotated: int, head_dim: int) -> float:
    """The share from which software computes `rotated` as int(head_dim * share)."""
    factor = rotated / head_dim
    return factor if int(head_dim * factor) == rotated else math.nextafter(factor, 1.0)


def _head_dim(stock: JsonObject) -> int:
    width: int = stock["hidden_size"] // stock["num_attention_heads"]
    return width


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
    rotated = int(_head_dim(stock) * factor)
    if not rotated or rotated % 2:
        raise NoStockClassError(f"{rotated} rotary dimensions of {_head_dim(stock)} in a head make no pairs")
    scaling = None if kind == "default" else {"rope_type": kind} | further
    return {"rope_theta": theta, "rope_scaling": scaling, "partial_rotary_factor": factor}


def _starcoder2_from_neox(config: Config, stock: JsonObject) -> JsonObject:
    positions = _phi_from_neox(config, stock)
    head_dim = _head_dim(stock)
    rotated = int(head_dim * positions.pop("partial_rotary_factor"))
    if rotated != head_dim:
        raise NoStockClassError(
            f"no stock class with a K/V-head count has sequential blocks and {rotated} rotary dimensions of {head_dim} in a "
            "head (in starcoder2 all are rotary)"
        )
    return positions


def _phi_from_gptj(config: Config, stock: JsonObject) -> JsonObject:
    _check_padding(stock)
    rotated = config.get("rotary_dim", 64)
    if type(rotated) is not int or not 0 < rotated <= _head_dim(stock) or rotated % 2:
        raise refused_value("rotary_dim", rotated)
    inner = stock["intermediate_size"] or 4 * stock["hidden_size"]
    return {"intermediate_size": inner, "partial_rotary_factor": partial_factor(rotated, _head_dim(stock))}


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
    width = config.get("kv_channels", _head_dim(stock))
    if width != _head_dim(stock):
        raise refused_value("kv_channels", width)
    return {"intermediate_size": stock["intermediate_size"] // 2}


def _minicpm(config: Config, stock: JsonObject) -> JsonObject:
    return _scaling(config, stock) | {
        "residual_multiplier": config.get("scale_depth", 1) / math.sqrt(stock["num_hidden_layers"]),
        "attention_multiplier": 1 / math.sqrt(_head_dim(stock)),
        "logits_scaling": stock["hidden_size"] / config.get("dim_model_base", 1),
    }


CONDITIONS = {
    "phi_from_gpt_neox": _phi_from_neox,
    "starcoder2_from_gpt_neox": _starcoder2_from_neox,
    "phi_from_gptj": _phi_from_gptj,
    "phi_from_codegen": _phi_from_gptj,
    "internlm": _internlm,
    "internlm2": _scaling,
    "baichuan": _baichuan,
    "qwen": _qwen,
    "minicpm": _minicpm,
}
"""By the name of a form: checks a source's config, and makes entries from it and from those of the form's table."""
