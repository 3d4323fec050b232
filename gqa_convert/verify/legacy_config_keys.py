"""The legacy config keys that OUT must have beside SOURCE's.

transformers 4, and software built on it, reads the number type, rotary positions and some counts from these keys. The
facts about each type are the family's; the rules repeat the converter's on purpose, to check them.
"""

from typing import Any

from gqa_convert.families.family import LegacyConfigKeys
from gqa_convert.verify.json_values import same_json


def legacy_keys(original: dict[str, Any], legacy: LegacyConfigKeys) -> dict[str, Any]:
    """The legacy keys and values that follow from SOURCE's config and are missing in it.

    Args:
        original: SOURCE's config.
        legacy: the names and rules of SOURCE's family.
    """
    expected = {"torch_dtype": original.get("dtype")} | {old: original.get(new) for new, old in legacy.renamed}
    nested, local = _shared_positions(original.get("rope_parameters"), legacy)
    expected |= local
    share = nested.get("partial_rotary_factor")
    expected |= {legacy.rotary_base: nested.get("rope_theta"), legacy.rotary_share: share}
    scaling = {key: nested[key] for key in nested if key not in ("rope_theta", "partial_rotary_factor")}
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    if rope_type != "default" and legacy.scaled_share in (None, share):
        expected["rope_scaling"] = _legacy_scaling(original, scaling, rope_type, legacy)
    if rope_type == "longrope":  # transformers 4 looks for it beside rope_scaling, not in it
        expected["original_max_position_embeddings"] = scaling.get("original_max_position_embeddings")
    absent = {key: value for key, value in expected.items() if value is not None and original.get(key) is None}
    if nested and rope_type == "default" and legacy.scales_unless_null and original.get("rope_scaling") is None:
        absent["rope_scaling"] = None
    return absent


def _shared_positions(stated: Any, legacy: LegacyConfigKeys) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rotary positions that legacy keys can state for all layers, and the keys for those of local layers."""
    nested: dict[str, Any] = stated if isinstance(stated, dict) else {}
    local: dict[str, Any] = {}
    sliding, full = nested.get("sliding_attention"), nested.get("full_attention")
    if isinstance(sliding, dict) and legacy.local_rotary_base is not None:
        local[legacy.local_rotary_base] = sliding.get("rope_theta")
        nested = full or {}
    elif (
        legacy.one_rotary_base
        and isinstance(full, dict)
        and sliding == {"rope_theta": full.get("rope_theta"), "rope_type": "default"}
    ):
        nested = full
    if any(type(value) is dict for value in nested.values()):  # legacy keys cannot state one set per kind of layer
        nested = {}
    return nested, local


def _legacy_scaling(
    original: dict[str, Any], scaling: dict[str, Any], rope_type: str, legacy: LegacyConfigKeys
) -> dict[str, Any]:
    """`rope_scaling` without the entries that transformers 5 adds, where classes of transformers 4 count the entries."""
    repeated = {key for key in scaling if key in original and same_json(original[key], scaling[key])}
    own = scaling.keys() - repeated - {"rope_type", "type"}
    if legacy.rope_scaling_keys and own == legacy.rope_scaling_keys:
        return {"type": rope_type} | {key: scaling[key] for key in scaling if key in own}
    return scaling
