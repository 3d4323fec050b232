"""The config keys that transformers 4 reads, for a config that transformers 5 saved: without them transformers 4 and
other software of its time would silently take defaults.
"""

from gqa_convert.checkpoint.strict_json import Config, JsonObject
from gqa_convert.families.family import LegacyConfigKeys
from gqa_convert.families.records import record_of


def legacy_config_keys(config: Config) -> JsonObject:
    """What `config` states only under the names of transformers 5, under those of transformers 4.

    Args:
        config: what config.json holds, for a stock class.

    Returns:
        Entries to add to it: `torch_dtype`; from `rope_parameters` the base and the share of rotary dimensions, under
        the names that the model type had for them, and `rope_scaling` with what belongs beside it; renamed counts such
        as `num_experts`. Nothing that the config has already.
    """
    legacy = record_of(config).legacy
    found = _renamed(config, ("dtype", "torch_dtype"), *legacy.renamed)
    rotary = config.get("rope_parameters") or {}
    sliding = rotary.get("sliding_attention")
    full = rotary.get("full_attention") or {}
    if not any(isinstance(value, dict) for value in rotary.values()):
        found |= _rotary_keys(rotary, legacy)
    elif sliding and legacy.local_rotary_base is not None:
        found |= _renamed(sliding, ("rope_theta", legacy.local_rotary_base)) | _rotary_keys(full, legacy)
    # other layers that differ have no keys in transformers 4
    return {key: value for key, value in found.items() if config.get(key) is None}


def _renamed(values: Config, *names: tuple[str, str]) -> JsonObject:
    """Values that are stated under a name, each under another."""
    return {old: values[new] for new, old in names if values.get(new) is not None}


def _rotary_keys(rotary: JsonObject, legacy: LegacyConfigKeys) -> JsonObject:
    """The base and the share of rotary dimensions and, where positions are scaled, `rope_scaling` and what belongs beside
    it: transformers 5 reads `rope_scaling` in place of `rope_parameters`.
    """
    found = _renamed(rotary, ("rope_theta", legacy.rotary_base), ("partial_rotary_factor", legacy.rotary_share))
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind == "default" or legacy.scaled_share not in (None, rotary.get("partial_rotary_factor")):
        return found
    scaling = {key: value for key, value in rotary.items() if key not in ("rope_theta", "partial_rotary_factor")}
    length = ("original_max_position_embeddings",) * 2
    return found | {"rope_scaling": scaling} | (_renamed(rotary, length) if kind == "longrope" else {})
