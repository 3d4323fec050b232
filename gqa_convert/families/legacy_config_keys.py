"""The config keys that transformers 4 reads, for a config that transformers 5 saved: without them transformers 4 and
other software of its time would silently take defaults.
"""

from gqa_convert.checkpoint.strict_json import Config, JsonObject
from gqa_convert.families.family import LegacyConfigKeys
from gqa_convert.families.table import FAMILIES

_BASE = "rope_theta"
_SHARE = "partial_rotary_factor"


def legacy_config_keys(config: Config) -> JsonObject:
    """What `config` states only under the names of transformers 5, under those of transformers 4.

    Args:
        config: what config.json holds, for a stock class.

    Returns:
        Entries to add to it: `torch_dtype`; from `rope_parameters` the base and the share of rotary dimensions, under
        the names that the model type had for them, and `rope_scaling` with what belongs beside it; renamed counts such
        as `num_experts`. Nothing that the config has already.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    legacy = LegacyConfigKeys() if family is None else family.legacy
    found: JsonObject = {}
    if isinstance(config.get("dtype"), str):
        found["torch_dtype"] = config["dtype"]
    found |= {old: config[new] for new, old in legacy.renamed if config.get(new) is not None}
    rotary = config.get("rope_parameters")
    if isinstance(rotary, dict):
        local, full = _by_kind(rotary)
        if local and legacy.local_rotary_base is not None:
            rotary = full
            found |= {legacy.local_rotary_base: local[_BASE]} if _BASE in local else {}
        elif local and legacy.one_rotary_base and local == {"rope_type": "default", _BASE: full.get(_BASE)}:
            rotary = full
        if not any(isinstance(value, dict) for value in rotary.values()):  # transformers 4 had no keys for each kind
            names = {_BASE: legacy.rotary_base, _SHARE: legacy.rotary_share}
            found |= {old: rotary[new] for new, old in names.items() if rotary.get(new) is not None}
            found |= _scaling(config, rotary, legacy)
    return {key: value for key, value in found.items() if config.get(key) is None}


def _by_kind(rotary: JsonObject) -> tuple[JsonObject, JsonObject]:
    """Rotary parameters of layers with sliding-window attention and of layers with full attention; both empty where the
    layers do not differ.
    """
    local, full = rotary.get("sliding_attention"), rotary.get("full_attention")
    return (local, full or {}) if isinstance(local, dict) and isinstance(full, dict | None) else ({}, {})


def _scaling(config: Config, rotary: JsonObject, legacy: LegacyConfigKeys) -> JsonObject:
    """`rope_scaling` and what belongs beside it, where they are needed: transformers 5 reads `rope_scaling` in place of
    `rope_parameters`.
    """
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind == "default":
        return {"rope_scaling": None} if rotary and legacy.scales_unless_null else {}
    if legacy.scaled_share is not None and rotary.get(_SHARE) != legacy.scaled_share:
        return {}
    stated = {key: value for key, value in rotary.items() if key not in (_BASE, _SHARE)}
    needed = {
        key: value for key, value in stated.items() if key not in ("rope_type", "type") and config.get(key) != value
    }
    if legacy.rope_scaling_keys and needed.keys() == legacy.rope_scaling_keys:
        stated = {"type": kind, **needed}
    trained = {
        key: value for key, value in rotary.items() if key == "original_max_position_embeddings" and kind == "longrope"
    }
    return {"rope_scaling": stated, **trained}
