"""What may be folded in an attention layer and what forbids it, from tensor headers and the config alone."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.errors import ConfigError
from gqa_convert.families.family import Family, RotaryCount, RotaryShare
from gqa_convert.families.geometry import AttentionFinder, AttentionLayer, config_value
from gqa_convert.merging.attention_heads import LayerLayout

Array = npt.NDArray[Any]

_CLIPPED = "it clips the outputs of its projections"
_NORMED = "its keys are normalised behind their projection"
_BUFFERS = ("bias", "masked_bias", "causal_mask")
"""Mask buffers that old checkpoints hold beside the projections."""


@dataclass(frozen=True, slots=True)
class AbsorptionLimits:
    """What may be folded in a layer, and why not more."""

    pairs: tuple[Array, Array]
    """Rows of a key head that form rotary pairs: real and imaginary parts. Only a complex number per pair can be
    folded, and any matrix for the other rows."""
    key_constraint: str | None = None
    """Why maps of the keys can't be folded into the query projection; None if they can."""
    value_constraint: str | None = None
    """Why maps of the values can't be folded into the output projection; None if they can."""
    order_constraint: str | None = None
    """Why K/V heads, with the query heads that read them, can't be reordered; None if they can."""


def find_absorption_limits(finder: AttentionFinder, layer: AttentionLayer) -> AbsorptionLimits:
    """The folding constraints of a layer.

    Args:
        finder: of the checkpoint.
        layer: one of its layers.

    Raises:
        ConfigError: the config states a number of rotary dimensions that makes no pairs.
    """
    family, config = finder.family, finder.config
    pairs = rotary_pairs(family, config, layer.key_head_dim)
    if layer.attention_kind != "decoder":  # no family has rotary positions in an encoder or in cross-attention
        pairs = (np.empty(0, int), np.empty(0, int))
    order_constraint = _order_constraint(finder, layer)
    if config_value(config, "clip_qkv") or config_value(config, "attn_config.clip_qkv"):
        return AbsorptionLimits(pairs, _CLIPPED, _CLIPPED, order_constraint)
    key_constraint = family.key_constraint or (_NORMED if _normed(finder, layer) else None)
    return AbsorptionLimits(pairs, key_constraint, family.value_constraint, order_constraint)


def _normed(finder: AttentionFinder, layer: AttentionLayer) -> bool:
    """Whether a norm follows the key projection. Its gains in the checkpoint tell, because configs often leave out
    defaults.
    """
    if finder.family.gainless_key_norm is not None:
        return bool(finder.config.get(*finder.family.gainless_key_norm))
    stem = f"{layer.module}.{finder.family.key_norm_name}."
    return finder.family.key_norm != "none" and any(name.startswith(stem) for name in finder.entries)


def _order_constraint(finder: AttentionFinder, layer: AttentionLayer) -> str | None:
    """Why heads can't be reordered; an unknown tensor in the attention module counts as a reason."""
    family, config = finder.family, finder.config
    for attention_kind, reason in family.order_constraints:
        if attention_kind == layer.attention_kind:
            return reason
    for key, reason in family.order_constrained_when:
        if config_value(config, key):
            return reason
    parts = LayerLayout(finder, layer)
    for name in finder.entries:
        if name.startswith(f"{layer.module}."):
            tail = name.removeprefix(f"{layer.module}.")
            known = name in parts.names or tail in _BUFFERS or tail.endswith("inv_freq") or _shared_gain(finder, tail)
            if parts.is_norm(name) or not known:
                return f"{tail} belongs to heads by their numbers"
    return None


def _shared_gain(finder: AttentionFinder, tail: str) -> bool:
    """Whether a tensor of the attention module holds the gains of a norm that all heads share."""
    key = finder.family.key_norm_name
    query = key.replace("key", "query") if key.startswith("key") else f"q{key[1:]}"
    return finder.family.key_norm == "shared" and tail in {
        f"{norm}.{kind}" for norm in (key, query) for kind in ("weight", "bias")
    }


def rotary_pairs(family: Family, config: dict[str, Any], head_dim: int) -> tuple[Array, Array]:
    """The rotary pairs of a key head.

    Args:
        family: of the checkpoint.
        config: its config.json.
        head_dim: rows of a key head.

    Returns:
        The rows that are real parts and those that are imaginary parts, in order of frequency; both empty without
        rotary positions.

    Raises:
        ConfigError: the config states a number of rotary dimensions that makes no pairs.
    """
    rotated = _rotated(family, config, head_dim)
    rows = np.arange(rotated)
    if family.rotary == "interleaved":
        return rows[0::2], rows[1::2]
    return rows[: rotated // 2], rows[rotated // 2 :]


def _rotated(family: Family, config: dict[str, Any], head_dim: int) -> int:
    """The number of rotary dimensions."""
    dimensions = family.rotary_dimensions
    if dimensions is None or _switched_off(family, config):
        return 0
    if isinstance(dimensions, RotaryCount):
        rotated = config.get(dimensions.key, dimensions.default) or head_dim
    else:
        rotated = _from_share(dimensions, config, head_dim)
    if type(rotated) is not int or not 0 <= rotated <= head_dim or rotated % 2:
        raise ConfigError(
            f"config.json states {rotated!r} rotary dimensions of {head_dim} in a head, which make no pairs: repair it"
        )
    return rotated


def _from_share(share: RotaryShare, config: dict[str, Any], head_dim: int) -> Any:
    stated = next((value for key in share.keys if (value := config_value(config, key)) is not None), None)
    if stated is None and share.count_key is not None and config.get(share.count_key) is not None:
        return config[share.count_key]
    stated = share.default if stated is None else stated
    if not isinstance(stated, int | float):
        raise ConfigError(f"config.json states {stated!r} as the rotary share of a head, which is no number: repair it")
    return int(head_dim * stated)


def _switched_off(family: Family, config: dict[str, Any]) -> bool:
    """Whether the config does without the rotary positions that its type may have."""
    if family.rotary_only_when is None:
        return False
    key, wanted = family.rotary_only_when
    stated = config.get(key)
    return (bool(stated) if isinstance(wanted, bool) else stated) != wanted
