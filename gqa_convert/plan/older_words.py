"""A config that transformers 5 saved, in the words of earlier clients too: those take a rotary base of 10000 where they find none."""

from typing import Any

_NESTED_BASE = ("rope_theta", "partial_rotary_factor")


def older_words(config: dict[str, Any]) -> dict[str, Any]:
    """What `config` states in transformers 5's words alone, in those from before.

    Args:
        config: what config.json holds.

    Returns:
        Further entries for it: `torch_dtype`, and from `rope_parameters` `rope_theta`, `partial_rotary_factor`, `rope_scaling`; of gemma3,
        whose layers have two kinds of positions, `rope_local_base_freq` too. Nothing that the config has already.
    """
    found: dict[str, Any] = {}
    if isinstance(config.get("dtype"), str):
        found["torch_dtype"] = config["dtype"]
    rotary = config.get("rope_parameters")
    if isinstance(rotary, dict):
        local = rotary.get("sliding_attention")
        if config.get("model_type") == "gemma3_text" and isinstance(local, dict) and "rope_theta" in local:
            found["rope_local_base_freq"] = local["rope_theta"]
            rotary = rotary.get("full_attention") or {}
        if any(isinstance(value, dict) for value in rotary.values()):
            rotary = {}  # other types with positions by kind of layer, for which there were no common keys
        found |= {key: rotary[key] for key in _NESTED_BASE if rotary.get(key) is not None}
        if rotary.get("rope_type", "default") != "default":
            found["rope_scaling"] = {key: value for key, value in rotary.items() if key not in _NESTED_BASE}
    return {key: value for key, value in found.items() if config.get(key) is None}
