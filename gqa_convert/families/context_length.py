"""How many tokens a model reads at once: what its config states, and the defaults."""

from collections.abc import Mapping, Sequence
from typing import Any

from gqa_convert.families.table import FAMILIES

LONGEST = 2048
"""The most tokens of a block or window, even if the model has positions for more."""

SPAN_LENGTH = 512
"""Encoder tokens of an example of span corruption, as T5 was trained."""

_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len", "seq_length")


def is_t5_like(config: Mapping[str, Any]) -> bool:
    """Whether a config.json belongs to T5's architecture, which was trained by span corruption and takes texts of any
    length.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    return family is not None and family.is_t5


def stated_positions(config: Mapping[str, Any]) -> int | None:
    """Number of tokens for which a model has positions (the decoder, in an encoder-decoder); None for any number, or
    where the config does not say.

    Args:
        config: what config.json holds.
    """
    if is_t5_like(config):  # some of these configs state an `n_positions`, which has no effect
        return None
    return stated_count(config, _POSITIONS)


def stated_count(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """The first of these keys with a positive number, in the config or in its `text_config`."""
    inner = config.get("text_config")
    for values in (config, inner if isinstance(inner, Mapping) else {}):
        for name in names:
            stated = values.get(name)
            if isinstance(stated, int) and not isinstance(stated, bool) and stated > 0:
                return stated
    return None


def block_length(config: Mapping[str, Any]) -> int:
    """Number of tokens of a block of text: as many as the model has positions for, up to 2048."""
    return min(LONGEST, stated_positions(config) or LONGEST)
