"""What the queries and the output projection beside an attention module's keys and values can take over, read from
SOURCE's config and tensors by verify's own rules.
"""

import copy
import importlib
from typing import Any

from gqa_convert.errors import ConfigError
from gqa_convert.families.family import Family
from gqa_convert.verify.geometry import Geometry, Module, Role, config_value
from gqa_convert.verify.tensors import FACTORED, FITTED
from gqa_convert.verify.weights import Weights


def foldable_roles(
    method: Any, geometry: Geometry, family: Family, config: dict[str, Any], source: Weights
) -> dict[str, frozenset[Role]]:
    """By module, the roles whose heads a method may make anything of; empty for the other methods.

    A fit may change all of them. Factoring folds maps of keys into queries unless a norm or clipping lies between them,
    and maps of values into outputs unless a gate, a norm or clipping does; otherwise they are means.
    """
    merged = [module for module in geometry.changed if module.after < module.before]
    if method in FITTED:
        return {module.name: frozenset(("query", "key", "value", "output")) for module in merged}
    if method not in FACTORED:
        return {}
    clipped = bool(config_value(config, "clip_qkv") or config_value(config, "attn_config.clip_qkv"))
    found: dict[str, frozenset[Role]] = {}
    for module in merged:
        roles: list[Role] = []
        if not clipped and not family.key_constraint and not _has_key_norm(module, family, config, source):
            roles += ["query", "key"]
        if not clipped and not family.value_constraint:
            roles += ["value", "output"]
        found[module.name] = frozenset(roles)
    return found


def _has_key_norm(module: Module, family: Family, config: dict[str, Any], source: Weights) -> bool:
    if family.gainless_key_norm is not None:
        key, default = family.gainless_key_norm
        return config.get(key, default) is not False
    gains = f"{module.name}.{family.key_norm_name}."
    return family.key_norm != "none" and any(name.startswith(gains) for name in source.tensors)


def rotary_pairs(family: Family, config: dict[str, Any], module: Module, head_dim: int) -> tuple[list[int], list[int]]:
    """The rows of a key head that rotate, in pairs: those of the real and those of the imaginary parts. For each pair only
    a complex factor folds into queries; for the other rows any matrix does.

    Raises:
        ConfigError: the config states an impossible number of rotary dimensions.
    """
    rotated = 0 if module.kind == "cross" else rotary_dims(family, config, head_dim)
    if family.rotary == "interleaved":
        return list(range(0, rotated, 2)), list(range(1, rotated, 2))
    return list(range(rotated // 2)), list(range(rotated // 2, rotated))


def rotary_dims(family: Family, config: dict[str, Any], head_dim: int) -> int:
    """How many rows of a head rotate, from transformers' own classes where they state it.

    Raises:
        ConfigError: the config states an impossible number.
    """
    if family.rotary == "none":
        return 0
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if family.stock_type not in CONFIG_MAPPING:
        return int(head_dim * family.rotary_share)
    known = {key: copy.deepcopy(value) for key, value in config.items() if key not in ("model_type", "auto_map")}
    stated = CONFIG_MAPPING[family.stock_type](**_decoded(known))
    if getattr(stated, "alibi", None) is True or getattr(stated, "use_mem_rope", None) is False:
        return 0
    if getattr(stated, "position_embedding_type", "rope") != "rope":
        return 0
    if family.rotary_count_key == "rotary_dim" and not family.reads_rotary_share:
        rotated = stated.rotary_dim or head_dim  # the attention computes its own angles
    else:
        rotated = _twice_the_angles(stated, head_dim)
    if type(rotated) is not int or not 0 <= rotated <= head_dim or rotated % 2:
        raise ConfigError(
            f"SOURCE's config states {rotated!r} rotary dimensions for heads of {head_dim}, expected an even number up to "
            "that: repair it"
        )
    return rotated


def _decoded(value: Any) -> Any:
    """transformers writes numbers that JSON lacks as {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [_decoded(one) for one in value]
    if isinstance(value, dict) and set(value) == {"__float__"}:
        return float(value["__float__"])
    return {key: _decoded(each) for key, each in value.items()} if isinstance(value, dict) else value


def _twice_the_angles(config: Any, head_dim: int) -> int:
    """Two rows for each angle of the model's rotary embedding."""
    try:
        module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
        names = [name for name in vars(module) if name.endswith("RotaryEmbedding") and "Vision" not in name]
        buffers = dict(getattr(module, names[0])(config).named_buffers())
        return 2 * max(len(angles) for buffer, angles in buffers.items() if buffer.endswith("inv_freq"))
    except (
        Exception
    ):  # types without an embedding class of their own rotate whole heads, unless a config says otherwise
        share = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor")
        return int(head_dim * (1.0 if share is None else share))
