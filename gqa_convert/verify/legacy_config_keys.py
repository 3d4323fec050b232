"""The legacy config keys that OUT must have beside SOURCE's, by rules that the converter does not share.

Releases of transformers before 5, and software built on them, read the number type, rotary positions and the number of
experts from these keys.
"""

from typing import Any

from gqa_convert.verify.json_values import same_json

_COUNTED = {
    "olmo": {"factor"},
    "olmo2": {"factor"},
    "phi3": {"short_factor", "long_factor"},
    "phi4_multimodal": {"short_factor", "long_factor"},
}
"""Types whose earlier class refuses `rope_scaling` with any entry beside its type and these."""


def legacy_keys(original: dict[str, Any]) -> dict[str, Any]:
    """The legacy keys and values that follow from SOURCE's config and are missing in it."""
    model_type = original.get("model_type")
    nested = original.get("rope_parameters")
    legacy: dict[str, Any] = {"torch_dtype": original.get("dtype")}
    if model_type == "qwen3_moe":
        legacy["num_experts"] = original.get("num_local_experts")
    nested, local = _shared_positions(model_type, nested if isinstance(nested, dict) else {})
    legacy |= local
    theta, part = (
        ("rotary_emb_base", "rotary_pct") if model_type == "gpt_neox" else ("rope_theta", "partial_rotary_factor")
    )
    legacy |= {theta: nested.get("rope_theta"), part: nested.get("partial_rotary_factor")}
    scaling = {key: nested[key] for key in nested if key not in ("rope_theta", "partial_rotary_factor")}
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    # Bamba's earlier class reads scaling only beside its default share of rotary dimensions
    if rope_type != "default" and (model_type != "bamba" or nested.get("partial_rotary_factor") == 0.5):
        legacy["rope_scaling"] = _counted_scaling(original, scaling, rope_type)
    if rope_type == "longrope":  # earlier classes look for it beside rope_scaling, not in it
        legacy["original_max_position_embeddings"] = scaling.get("original_max_position_embeddings")
    absent = {key: value for key, value in legacy.items() if value is not None and original.get(key) is None}
    if (
        nested
        and rope_type == "default"
        and model_type in ("apertus", "gpt_oss")
        and original.get("rope_scaling") is None
    ):
        absent["rope_scaling"] = None  # their earlier classes scale by default
    return absent


def _shared_positions(model_type: Any, nested: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rotary positions that legacy keys can state for all layers, and the keys for those of local layers."""
    local: dict[str, Any] = {}
    sliding, full = nested.get("sliding_attention"), nested.get("full_attention")
    if isinstance(sliding, dict) and model_type in ("gemma3_text", "gemma3n_text"):
        local["rope_local_base_freq"] = sliding.get("rope_theta")
        nested = full or {}
    elif (
        model_type == "olmo3"
        and isinstance(full, dict)
        and sliding == {"rope_theta": full.get("rope_theta"), "rope_type": "default"}
    ):
        nested = full
    if any(type(value) is dict for value in nested.values()):  # legacy keys cannot state one set per kind of layer
        nested = {}
    return nested, local


def _counted_scaling(original: dict[str, Any], scaling: dict[str, Any], rope_type: str) -> dict[str, Any]:
    """`rope_scaling` without the entries that transformers 5 adds, for types whose earlier class counts the entries."""
    repeated = {key for key in scaling if key in original and same_json(original[key], scaling[key])}
    own = scaling.keys() - repeated - {"rope_type", "type"}
    if own == _COUNTED.get(str(original.get("model_type"))):
        return {"type": rope_type} | {key: scaling[key] for key in scaling if key in own}
    return scaling
