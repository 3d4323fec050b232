"""The folding constraints of an attention module, read from SOURCE's config and tensors by verify's own rules."""

import copy
import importlib
from dataclasses import dataclass
from typing import Any

from gqa_convert.errors import ConfigError
from gqa_convert.families.family import Family, RotaryShare
from gqa_convert.verify.checkpoint_reader import Weights
from gqa_convert.verify.geometry import AttentionKind, config_value


@dataclass(frozen=True, slots=True)
class RotaryPairs:
    """The rotary dimensions of a key head in pairs that rotate together, in the order of their frequencies."""

    real: tuple[int, ...]
    """The row of each pair that stands for the real part."""
    imaginary: tuple[int, ...]
    """The row of each pair that stands for the imaginary part."""


@dataclass(frozen=True, slots=True)
class FoldingConstraints:
    """What the projections beside an attention module's keys and values can take over."""

    keys: bool
    """Whether maps of keys fold into queries: no norm and no clipping lies between them."""
    values: bool
    """Whether maps of values fold into the output projection: no gate, norm or clipping lies between them."""
    pairs: RotaryPairs
    """The rotary pairs. For each of them only a complex factor folds; for the other rows of a key head, any matrix
    does.
    """


def read_folding_constraints(
    family: Family, config: dict[str, Any], source: Weights, module: str, attention_kind: AttentionKind, head_dim: int
) -> FoldingConstraints:
    """The folding constraints of one attention module.

    Args:
        family: SOURCE's family.
        config: SOURCE's config.
        source: SOURCE's tensors.
        module: the module's name.
        attention_kind: the module's kind of attention.
        head_dim: of a key head.

    Raises:
        ConfigError: the config states an impossible number of rotary dimensions.
    """
    rotated = 0 if attention_kind == "cross" else rotary_dims(family, config, head_dim)
    clipped = bool(config_value(config, "clip_qkv") or config_value(config, "attn_config.clip_qkv"))
    gains = f"{module}.{family.key_norm_name}."
    normed = family.key_norm != "none" and any(name.startswith(gains) for name in source.file_of)
    if family.gainless_key_norm is not None:
        key, default = family.gainless_key_norm
        normed = config.get(key, default) is not False
    return FoldingConstraints(
        keys=not (clipped or normed or family.key_constraint),
        values=not (clipped or family.value_constraint),
        pairs=rotary_pairs(rotated, interleaved=family.rotary == "interleaved"),
    )


def rotary_pairs(rotated: int, *, interleaved: bool) -> RotaryPairs:
    """The pairs among the first `rotated` rows of a head: neighbours if `interleaved`, else half of them apart."""
    if interleaved:
        return RotaryPairs(tuple(range(0, rotated, 2)), tuple(range(1, rotated, 2)))
    return RotaryPairs(tuple(range(rotated // 2)), tuple(range(rotated // 2, rotated)))


def rotary_dims(family: Family, config: dict[str, Any], head_dim: int) -> int:
    """How many rows of a head rotate, from transformers' own classes where they state it.

    Raises:
        ConfigError: the config states an impossible number.
    """
    dimensions = family.rotary_dimensions
    if dimensions is None:
        return 0
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if isinstance(dimensions, RotaryShare) and family.stock_type not in CONFIG_MAPPING:  # transformers has no class
        return int(head_dim * dimensions.default)
    stated = CONFIG_MAPPING[family.stock_type](
        # a copy, to which the class adds entries
        **{
            key: _decoded(copy.deepcopy(value))
            for key, value in config.items()
            if key not in ("model_type", "auto_map")
        }
    )
    if any(getattr(stated, key, None) is value for key, value in (("alibi", True), ("use_mem_rope", False))):
        return 0
    if getattr(stated, "position_embedding_type", "rope") != "rope":
        return 0
    rotated: Any
    if family.rotary_count_key == "rotary_dim" and not dimensions.keys:  # the attention computes its own angles
        rotated = stated.rotary_dim or head_dim
    else:
        rotated = _twice_the_angles(stated, head_dim)
    if type(rotated) is not int or not 0 <= rotated <= head_dim or rotated % 2:
        raise ConfigError(
            f"SOURCE's config states {rotated!r} rotary dimensions for heads of {head_dim}, expected an even number up "
            "to that: repair it"
        )
    return rotated


def _decoded(value: Any) -> Any:
    """transformers writes numbers that JSON lacks as {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [_decoded(one) for one in value]
    return float(value["__float__"]) if isinstance(value, dict) and set(value) == {"__float__"} else value


def _twice_the_angles(config: Any, head_dim: int) -> Any:
    """Two rows for each angle of the model's rotary embedding."""
    try:
        module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
        name = next(name for name in vars(module) if name.endswith("RotaryEmbedding") and "Vision" not in name)
        buffers = dict(getattr(module, name)(config).named_buffers())
        return 2 * max(len(angles) for buffer, angles in buffers.items() if buffer.endswith("inv_freq"))
    except (
        Exception
    ):  # types without an embedding class of their own rotate whole heads, unless their config says otherwise
        share = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor")
        return int(head_dim * (1.0 if share is None else share))
