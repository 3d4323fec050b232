"""What the projections beside a key or a value head can take of it, read by rules of our own from SOURCE's config and
tensors.
"""

import importlib
from dataclasses import dataclass
from typing import Any

from gqa_convert.errors import ConfigError
from gqa_convert.families.family import Family, RotaryCount, RotaryShare
from gqa_convert.verify.checkpoint_reader import Weights
from gqa_convert.verify.geometry import AttentionKind, config_value

Pairs = tuple[tuple[int, ...], tuple[int, ...]]
"""Rows of a key head that turn with the token's position: real and imaginary parts, in order of frequency."""


@dataclass(frozen=True, slots=True)
class FoldingConstraints:
    """Of an attention module."""

    keys: bool
    """Whether the queries can absorb maps of the keys: no norm or clipping stands between."""
    values: bool
    """Whether the output projection can absorb maps of the values: no gate, norm or clipping stands between."""
    pairs: Pairs
    """Only a complex number for each of them can be absorbed, and any matrix of the other rows."""


def read_folding_constraints(
    family: Family, config: dict[str, Any], source: Weights, module: str, attention_kind: AttentionKind, width: int
) -> FoldingConstraints:
    """The freedom of one attention module.

    Args:
        family: of SOURCE.
        config: SOURCE's.
        source: its tensors.
        module: its name.
        place: where it belongs.
        width: rows of a key head.

    Raises:
        ConfigError: the config turns an impossible number of rows.
    """
    turning = 0 if attention_kind == "cross" else rotated_rows(family, config, width)
    clipped = bool(config_value(config, "clip_qkv") or config_value(config, "attn_config.clip_qkv"))
    gains = f"{module}.{family.key_norm_name}."
    normed = family.key_norm != "none" and any(name.startswith(gains) for name in source.file_of)
    if family.gainless_key_norm is not None:
        key, default = family.gainless_key_norm
        normed = config.get(key, default) is not False
    return FoldingConstraints(
        keys=not (clipped or normed or family.key_constraint),
        values=not (clipped or family.value_constraint),
        pairs=rotary_pairs(turning, interleaved=family.rotary == "interleaved"),
    )


def rotary_pairs(rows: int, *, interleaved: bool) -> Pairs:
    """The first `rows` rows of a head as pairs: neighbours where `interleaved`, half of them apart else."""
    if interleaved:
        return tuple(range(0, rows, 2)), tuple(range(1, rows, 2))
    return tuple(range(rows // 2)), tuple(range(rows // 2, rows))


def rotated_rows(family: Family, config: dict[str, Any], width: int) -> int:
    """How many rows of a head turn: asked of transformers' own classes, wherever they tell it.

    Raises:
        ConfigError: the config turns an impossible number of rows.
    """
    dimensions = family.rotary_dimensions
    if dimensions is None:
        return 0
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if isinstance(dimensions, RotaryShare) and family.stock_type not in CONFIG_MAPPING:  # no class that could be asked
        return int(width * dimensions.default)
    stated = CONFIG_MAPPING[family.stock_type](
        **{key: _decoded(value) for key, value in config.items() if key not in ("model_type", "auto_map")}
    )
    if any(getattr(stated, key, None) is value for key, value in (("alibi", True), ("use_mem_rope", False))):
        return 0
    if getattr(stated, "position_embedding_type", "rope") != "rope":
        return 0
    rotated: Any
    if isinstance(dimensions, RotaryCount):  # the attention computes its own angles
        rotated = getattr(stated, dimensions.key) or width
    else:
        rotated = _angles(stated, width)
    if type(rotated) is not int or not 0 <= rotated <= width or rotated % 2:
        raise ConfigError(
            f"the config of SOURCE turns {rotated!r} of {width} rows of a head, which makes no pairs: repair it"
        )
    return rotated


def _decoded(value: Any) -> Any:
    """Transformers writes numbers that JSON has not as {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [_decoded(one) for one in value]
    return float(value["__float__"]) if isinstance(value, dict) and set(value) == {"__float__"} else value


def _angles(config: Any, width: int) -> Any:
    """Rows that turn in a config's model: two for each angle of its rotary embedding; all, where it has none of its
    own.
    """
    try:
        module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
        name = next(name for name in vars(module) if name.endswith("RotaryEmbedding") and "Vision" not in name)
        buffers = dict(getattr(module, name)(config).named_buffers())
        return 2 * max(len(angles) for buffer, angles in buffers.items() if buffer.endswith("inv_freq"))
    except Exception:  # types without such a class of their own turn whole heads, unless their config says otherwise
        share = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor")
        return int(width * (1.0 if share is None else share))
