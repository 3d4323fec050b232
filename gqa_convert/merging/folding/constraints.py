"""What stands between a projection and the one that would absorb its maps, from the headers and the config alone."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.families.geometry import AttentionFinder, AttentionLayer, config_value
from gqa_convert.merging.folding.heads import LayerTensors
from gqa_convert.merging.folding.rotary import rotary_pairs

Array = npt.NDArray[Any]

_CLIPPED = "it clips what its projections yield"
_NORMED = "its keys are normalised behind their projection"
_BUFFERS = ("bias", "masked_bias", "causal_mask")
"""Masks that old checkpoints hold beside the projections."""


@dataclass(frozen=True, slots=True)
class FoldingConstraints:
    """What may be absorbed in a layer, and why not more."""

    pairs: tuple[Array, Array]
    """Rows of a key head that form rotary pairs, real and imaginary parts; the other rows do not turn."""
    key_constraint: str | None = None
    """Why the queries can't take what is divided out of the keys; None if they can."""
    value_constraint: str | None = None
    """Why the output projection can't take what is divided out of the values."""
    order_constraint: str | None = None
    """Why K/V heads, with the query heads that read them, can't change places."""


def find_folding_constraints(finder: AttentionFinder, layer: AttentionLayer) -> FoldingConstraints:
    """What may be absorbed in a layer.

    Args:
        finder: of the checkpoint.
        layer: one of its layers.

    Raises:
        ConfigError: the config's rotary positions make no sense.
    """
    family, config = finder.family, finder.config
    pairs = rotary_pairs(family, config, layer.key_head_dim)
    if layer.attention_kind != "decoder":  # no family turns the keys of an encoder's output
        pairs = (np.empty(0, int), np.empty(0, int))
    order_constraint = _order_constraint(finder, layer)
    if config_value(config, "clip_qkv") or config_value(config, "attn_config.clip_qkv"):
        return FoldingConstraints(pairs, _CLIPPED, _CLIPPED, order_constraint)
    key_constraint = family.key_constraint or (_NORMED if _normed(finder, layer) else None)
    return FoldingConstraints(pairs, key_constraint, family.value_constraint, order_constraint)


def _normed(finder: AttentionFinder, layer: AttentionLayer) -> bool:
    """Whether a norm follows the key projection. Most leave gains in the checkpoint; configs often leave out what is
    the default.
    """
    if finder.family.gainless_key_norm is not None:
        return bool(finder.config.get(*finder.family.gainless_key_norm))
    stem = f"{layer.module}.{finder.family.key_norm_name}."
    return finder.family.key_norm != "none" and any(name.startswith(stem) for name in finder.entries)


def _order_constraint(finder: AttentionFinder, layer: AttentionLayer) -> str | None:
    """Whether anything but the projections knows heads by their numbers: what is unknown here may."""
    family, config = finder.family, finder.config
    for attention_kind, reason in family.order_constraints:
        if attention_kind == layer.attention_kind:
            return reason
    for key, reason in family.order_constrained_when:
        if config_value(config, key):
            return reason
    parts = LayerTensors(finder, layer)
    for name in finder.entries:
        if name.startswith(f"{layer.module}."):
            tail = name.removeprefix(f"{layer.module}.")
            known = name in parts.names or tail in _BUFFERS or tail.endswith("inv_freq") or _shared_gain(finder, tail)
            if parts.is_norm(name) or not known:
                return f"{tail} belongs to heads by their numbers"
    return None


def _shared_gain(finder: AttentionFinder, tail: str) -> bool:
    """Whether a tensor of the attention module holds gains that a norm of queries or keys has for all heads alike."""
    key = finder.family.key_norm_name
    query = key.replace("key", "query") if key.startswith("key") else f"q{key[1:]}"
    return finder.family.key_norm == "shared" and tail in {
        f"{norm}.{kind}" for norm in (key, query) for kind in ("weight", "bias")
    }
