"""Which maps between the heads of an attention layer its projections can absorb, from tensor headers and the config."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from gqa_convert.errors import ConfigError
from gqa_convert.families.family import Family
from gqa_convert.families.geometry import AttentionFinder, AttentionLayer, config_value
from gqa_convert.merging.attention_heads import LayerLayout
from gqa_convert.merging.factorisation import Array

_CLIPPED = "it clips the outputs of its projections"
_NORMED = "its keys are normalised behind their projection"
_BUFFERS = ("bias", "masked_bias", "causal_mask", "rotary_emb.inv_freq")
"""Buffers that old checkpoints hold beside the projections."""


@dataclass(frozen=True, slots=True)
class AbsorptionLimits:
    """What the projections of a layer can absorb, and why not more."""

    pairs: Array
    """[2, f]: the rows of a key head that are real and imaginary parts of its rotary pairs, in order of frequency. Only
    a complex number per pair can be absorbed, and any matrix for the other rows."""
    key_constraint: str | None = None
    """Why the query projection can't absorb maps of the keys; None if it can."""
    value_constraint: str | None = None
    """Why the output projection can't absorb maps of the values; None if it can."""
    order_constraint: str | None = None
    """Why K/V heads, with the query heads that read them, can't be reordered; None if they can."""

    def divide_rows(self, head_dim: int, first_low: int | None = None) -> tuple[Array, Array]:
        """The rows of a key head of `head_dim` rows that merge as rows without positions, [n], the strongest direction
        first; and the pairs that do not, [2, f].

        Args:
            head_dim: rows of the head.
            first_low: pairs from this index on count as rows without positions, the lowest frequency first; None for
                none.
        """
        turning = self.pairs[:, :first_low]
        low = self.pairs[:, turning.shape[1] :]
        still = np.setdiff1d(np.arange(head_dim), self.pairs)
        return np.concatenate([still, low.T[::-1].reshape(-1)]), turning


def find_absorption_limits(finder: AttentionFinder, layer: AttentionLayer) -> AbsorptionLimits:
    """The absorption limits of a layer.

    Args:
        finder: of the checkpoint.
        layer: one of its layers.

    Raises:
        ConfigError: the config states a number of rotary dimensions that makes no pairs.
    """
    family, config = finder.family, finder.config
    pairs = rotary_pairs(family, config, layer.key_head_dim)
    if layer.attention_kind != "decoder":  # no family has rotary positions in an encoder or in cross-attention
        pairs = pairs[:, :0]
    key_constraint, value_constraint = family.key_constraint, family.value_constraint
    if key_constraint is None and _normalises_keys(finder, layer):
        key_constraint = _NORMED
    if config_value(config, "clip_qkv") or config_value(config, "attn_config.clip_qkv"):
        key_constraint = value_constraint = _CLIPPED
    return AbsorptionLimits(pairs, key_constraint, value_constraint, _order_constraint(finder, layer))


def rotary_pairs(family: Family, config: dict[str, Any], head_dim: int) -> Array:
    """The rotary pairs of a key head.

    Args:
        family: of the checkpoint.
        config: its config.json.
        head_dim: rows of a key head.

    Returns:
        [2, f]: the rows that are real parts and those that are imaginary parts, in order of frequency.

    Raises:
        ConfigError: the config states a number of rotary dimensions that makes no pairs.
    """
    count = _rotary_dimensions(family, config, head_dim)
    if type(count) is not int or not 0 <= count <= head_dim or count % 2:
        raise ConfigError(
            f"config.json states {count!r} rotary dimensions of {head_dim} in a head, which make no pairs: repair it"
        )
    rows = np.arange(count)
    return rows.reshape(-1, 2).T if family.rotary == "interleaved" else rows.reshape(2, -1)


def _rotary_dimensions(family: Family, config: dict[str, Any], head_dim: int) -> object:
    """What the config states, directly or as a share of the head; it may be no number."""
    dimensions = family.rotary_dimensions
    if dimensions is None:
        return 0
    if family.rotary_only_when is not None:
        key, wanted = family.rotary_only_when
        if config.get(key, False) != wanted:
            return 0
    shares = [config_value(config, key) for key in dimensions.keys]
    shares = [share for share in shares if share is not None]
    if not shares and dimensions.count_key and config.get(dimensions.count_key) is not None:
        return config[dimensions.count_key]
    share = shares[0] if shares else dimensions.default
    return int(head_dim * share) if isinstance(share, int | float) else share


def _normalises_keys(finder: AttentionFinder, layer: AttentionLayer) -> bool:
    """Whether a norm follows the key projection. Its gains in the checkpoint tell, because configs often leave out
    defaults.
    """
    family = finder.family
    if family.gainless_key_norm is not None:
        return bool(finder.config.get(*family.gainless_key_norm))
    gains = f"{layer.module}.{family.key_norm_name}."
    return family.key_norm != "none" and any(name.startswith(gains) for name in finder.entries)


def _order_constraint(finder: AttentionFinder, layer: AttentionLayer) -> str | None:
    """Why heads can't be reordered; an unknown tensor in the attention module counts as a reason."""
    family = finder.family
    for attention_kind, reason in family.order_constraints:
        if attention_kind == layer.attention_kind:
            return reason
    for key, reason in family.order_constrained_when:
        if config_value(finder.config, key):
            return reason
    stem = f"{layer.module}."
    shared = [f"{stem}{name}" for name in _BUFFERS]
    if family.key_norm == "shared":  # its gains are the same for every head
        for norm in (family.key_norm_name, family.query_norm_name):
            shared += [f"{stem}{norm}.weight", f"{stem}{norm}.bias"]
    others = finder.entries.keys() - {*LayerLayout(finder, layer).names, *shared}
    for name in sorted(others):
        if name.startswith(stem):
            return f"{name.removeprefix(stem)} belongs to heads by their numbers"
    return None
