"""Which maps between the heads of an attention layer its projections can absorb, from tensor
headers and the config.
"""

from dataclasses import dataclass

import numpy as np

from gqa_convert.families.composite import config_value
from gqa_convert.families.geometry import AttentionFinder, AttentionLayer
from gqa_convert.families.rotary import rotary_pairs

from .attention_heads import LayerLayout
from .factorisation import Array

_CLIPPED = "it clips the outputs of its projections"
_NORMED = "its keys are normalised behind their projection"
_BUFFERS = ("bias", "masked_bias", "causal_mask", "rotary_emb.inv_freq")
"""Buffers that old checkpoints hold beside the projections."""


@dataclass(frozen=True)
class AbsorptionLimits:
    """What the projections of a layer can absorb, and why not more.

    Attributes:
        pairs: [2, f]: the rows of a key head that are real and imaginary parts of its rotary pairs,
            in order of frequency. Only a complex number per pair can be absorbed, and any matrix
            for the other rows.
        key_constraint: why the query projection can't absorb maps of the keys; None if it can.
        value_constraint: why the output projection can't absorb maps of the values; None if it can.
        order_constraint: why K/V heads, with the query heads that read them, can't be reordered;
            None if they can.
    """

    pairs: Array
    key_constraint: str | None = None
    value_constraint: str | None = None
    order_constraint: str | None = None

    def divide_rows(self, head_dim: int, first_low: int | None) -> tuple[Array, Array]:
        """The rows of a key head of `head_dim` rows that merge as rows without positions, [n], the
        strongest direction first; and the pairs that do not, [2, f].

        Args:
            head_dim: rows of the head.
            first_low: pairs from this index on count as rows without positions, the lowest
                frequency first; None for none.
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
    if (
        layer.attention_kind != "decoder"
    ):  # no family has rotary positions in an encoder or in cross-attention
        pairs = pairs[:, :0]
    # they tell, because configs often leave out defaults
    gains = f"{layer.module}.{family.key_norm_name}."
    is_normed = any(name.startswith(gains) for name in finder.entries)
    if family.gainless_key_norm is not None:
        is_normed = config.get(*family.gainless_key_norm)
    key_constraint, value_constraint = family.key_constraint, family.value_constraint
    if is_normed:
        key_constraint = key_constraint or _NORMED
    if config_value(config, "clip_qkv") or config_value(config, "attn_config.clip_qkv"):
        key_constraint = value_constraint = _CLIPPED
    return AbsorptionLimits(
        pairs, key_constraint, value_constraint, _order_constraint(finder, layer)
    )


def _order_constraint(finder: AttentionFinder, layer: AttentionLayer) -> str | None:
    """Why heads can't be reordered; an unknown tensor in the attention module counts as a
    reason.
    """
    family = finder.family
    for attention_kind, reason in family.order_constraints:
        if attention_kind == layer.attention_kind:
            return reason
    for key, reason in family.order_constrained_when:
        if config_value(finder.config, key):
            return reason
    stem, names = f"{layer.module}.", LayerLayout(finder, layer).names
    for name in finder.entries:
        tail = name.removeprefix(stem)
        if tail == name or name in names or tail in _BUFFERS:
            continue
        if tail.rpartition(".")[0] not in family.shared_norm_names:
            return f"{tail} belongs to heads by their numbers"
    return None
