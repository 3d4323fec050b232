"""The config keys that transformers 4 reads, for a config that transformers 5 saved: without them
transformers 4 and other software of its time would silently take defaults.
"""

from gqa_convert.runtime.json_objects import Config, JsonObject

from .composite import config_value
from .records import record_of

_NAMES = {
    "dtype": "torch_dtype",
    "rope_parameters": "rope_scaling",
    "rope_parameters.rope_theta": "rope_theta",
    "rope_parameters.partial_rotary_factor": "partial_rotary_factor",
}
"""Keys of transformers 5, each with its name in transformers 4, which a type's own names override.
"""


def legacy_config_keys(config: Config) -> JsonObject:
    """What `config` states only under the names of transformers 5, under those of transformers 4.

    Args:
        config: what config.json holds, for a stock class.

    Returns:
        Entries to add to it: `torch_dtype`; from `rope_parameters` the base and the share of rotary
        dimensions, under the names that the model type had for them; where positions are scaled,
        `rope_scaling` and what belongs beside it, since transformers 5 reads it in place of
        `rope_parameters`; renamed counts such as `num_experts`. Nothing that the config has
        already. Layers that differ in their positions have no `rope_scaling`, unless the type names
        one of their kinds.
    """
    family = record_of(config)
    found: JsonObject = {}
    for key, name in {**_NAMES, **family.legacy_keys}.items():
        value = config_value(config, key)
        if value is not None:
            found[name] = value
    rotary = found.pop("rope_scaling", {})
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    share = rotary.get("partial_rotary_factor")
    if kind != "default" and family.legacy_scaled_share in (None, share):
        apart = ("rope_theta", "partial_rotary_factor")
        found["rope_scaling"] = {key: value for key, value in rotary.items() if key not in apart}
        length = rotary.get("original_max_position_embeddings")
        if kind == "longrope" and length is not None:
            found["original_max_position_embeddings"] = length
    return {key: value for key, value in found.items() if config.get(key) is None}
