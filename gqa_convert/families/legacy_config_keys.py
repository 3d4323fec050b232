"""A config that transformers 5 saved, in the words of earlier clients too, which take a default of their own where they
find none.
"""

from typing import Any

_BASE = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factor"}
_NAMES = {"gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}}
"""What the entries of `rope_parameters` were called outside it, by model type."""

_SCALED_BY_DEFAULT = ("apertus", "gpt_oss")
"""Types whose classes scaled positions unless told not to."""

_LONG = {"short_factor", "long_factor"}
_ONLY = {"olmo": {"factor"}, "olmo2": {"factor"}, "phi3": _LONG, "phi4_multimodal": _LONG}
"""Types that refused a `rope_scaling` with anything but these and `type`."""


def legacy_config_keys(config: dict[str, Any]) -> dict[str, Any]:
    """What `config` states in transformers 5's words alone, in those from before.

    Args:
        config: what config.json holds, for a stock class.

    Returns:
        Further entries for it: `torch_dtype`; from `rope_parameters` base and part of each head that turns, as the
        model type called them, `rope_scaling` and what belongs beside it; `num_experts` of qwen3_moe. Nothing that the
        config has already.
    """
    model_type = config.get("model_type")
    found: dict[str, Any] = {}
    if isinstance(config.get("dtype"), str):
        found["torch_dtype"] = config["dtype"]
    if model_type == "qwen3_moe" and "num_local_experts" in config:
        found["num_experts"] = config["num_local_experts"]
    rotary = config.get("rope_parameters")
    if isinstance(rotary, dict):
        local, general = _by_kind(rotary)
        if local and model_type in ("gemma3_text", "gemma3n_text"):
            rotary = general
            found |= {"rope_local_base_freq": local["rope_theta"]} if "rope_theta" in local else {}
        elif (
            local
            and model_type == "olmo3"
            and local == {"rope_type": "default", "rope_theta": general.get("rope_theta")}
        ):
            rotary = general  # those classes had one base, and scaled positions where attention is full
        if not any(isinstance(value, dict) for value in rotary.values()):  # else words in common are wanting
            found |= {
                name: rotary[key]
                for key, name in _NAMES.get(str(model_type), _BASE).items()
                if rotary.get(key) is not None
            }
            found |= _scaling(config, rotary)
    return {key: value for key, value in found.items() if config.get(key) is None}


def _by_kind(rotary: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Positions where attention is local, and where it is full; both empty where layers don't differ."""
    local, general = rotary.get("sliding_attention"), rotary.get("full_attention")
    return (local, general or {}) if isinstance(local, dict) and isinstance(general, dict | None) else ({}, {})


def _scaling(config: dict[str, Any], rotary: dict[str, Any]) -> dict[str, Any]:
    """`rope_scaling` and what belongs to it, where they are needed. transformers 5 takes it in place of
    `rope_parameters`.
    """
    model_type, kind = config.get("model_type"), rotary.get("rope_type", rotary.get("type", "default"))
    if kind == "default":
        return {"rope_scaling": None} if rotary and model_type in _SCALED_BY_DEFAULT else {}
    if model_type == "bamba" and rotary.get("partial_rotary_factor") != 0.5:
        return {}  # beside it both read the factor as 0.5, whatever is stated
    stated = {key: value for key, value in rotary.items() if key not in _BASE}
    needed = {
        key: value for key, value in stated.items() if key not in ("rope_type", "type") and config.get(key) != value
    }
    if needed.keys() == _ONLY.get(str(model_type)):
        stated = {"type": kind, **needed}
    trained = {
        key: value for key, value in rotary.items() if key == "original_max_position_embeddings" and kind == "longrope"
    }
    return {"rope_scaling": stated, **trained}
