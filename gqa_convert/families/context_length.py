"""How many tokens a model reads at once, by what its config says, and what is taken where nobody says."""

from collections.abc import Mapping, Sequence
from typing import Any

from gqa_convert.families.table import FAMILIES

LONGEST = 2048
"""Tokens of a block or window, however many more the model has positions for."""

SPAN_LENGTH = 512
"""Encoder tokens of an example of span corruption, as T5 was trained."""

_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len", "seq_length")


def is_t5_like(config: Mapping[str, Any]) -> bool:
    """Whether what a config.json holds is of the T5 family: trained by span corruption, with positions for any number
    of tokens.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    return family is not None and family.is_t5


def stated_positions(config: Mapping[str, Any]) -> int | None:
    """Tokens that a model, of an encoder-decoder the decoder, has positions for; None for any number, or where the
    config does not say.

    Args:
        config: what config.json holds.
    """
    return (
        None if is_t5_like(config) else stated_count(config, _POSITIONS)
    )  # some of T5's family state an `n_positions` nevertheless


def stated_count(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """The first of these entries that holds a number above 0, in the config or in that of its text model."""
    inner = config.get("text_config")
    for values in (config, inner if isinstance(inner, Mapping) else {}):
        for name in names:
            stated = values.get(name)
            if isinstance(stated, int) and not isinstance(stated, bool) and stated > 0:
                return stated
    return None


def block_length(config: Mapping[str, Any]) -> int:
    """Tokens of a block of text: as many as the model has positions for, up to 2048."""
    return min(LONGEST, stated_positions(config) or LONGEST)
