"""What may be folded in an attention layer and what forbids it, from tensor headers and the config alone."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.families.geometry import AttentionFinder, AttentionLayer, config_value
from gqa_convert.merging.folding.heads import LayerTensors
from gqa_convert.merging.folding.rotary import rotary_pairs

Array = npt.NDArray[Any]

_CLIPPED = "it clips the outputs of its projections"
_NORMED = "its keys are normalised behind their projection"
_BUFFERS = ("bias", "masked_bias", "causal_mask")
"""Mask buffers that old checkpoints hold beside the projections."""


@dataclass(frozen=True, slots=True)
class FoldingConstraints:
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


def find_folding_constraints(finder: AttentionFinder, layer: AttentionLayer) -> FoldingConstraints:
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
        return FoldingConstraints(pairs, _CLIPPED, _CLIPPED, order_constraint)
    key_constraint = family.key_constraint or (_NORMED if _normed(finder, layer) else None)
    return FoldingConstraints(pairs, key_constraint, family.value_constraint, order_constraint)


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
    parts = LayerTensors(finder, layer)
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
