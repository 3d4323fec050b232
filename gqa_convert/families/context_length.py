"""How many tokens a model reads at once: what its config states, and the defaults."""

from collections.abc import Mapping, Sequence
from typing import Any

from gqa_convert.families.composite import decoder_config
from gqa_convert.families.records import record_of
from gqa_convert.runtime.json_objects import Config

LONGEST = 2048
"""The most tokens of a block or window, even if the model has positions for more."""

SPAN_LENGTH = 512
"""Encoder tokens of an example of span corruption, as T5 was trained."""

FARTHEST = 32_768
"""The position up to which blocks of calibration text are stretched by default, even if the context is longer."""

POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_target_positions",
    "max_seq_len",
    "seq_length",
)
ENCODER_POSITIONS = ("max_source_positions", "max_encoder_position_embeddings", *POSITIONS)

_ORIGINAL = "original_max_position_embeddings"


def stated_positions(config: Config, names: Sequence[str] = POSITIONS) -> int | None:
    """Number of tokens for which a model has positions (the decoder, in an encoder-decoder); None for any number, or
    where the config does not say.

    Args:
        config: what config.json holds.
        names: of the keys; `ENCODER_POSITIONS` for the encoder.
    """
    return (
        None if record_of(config).is_t5 else stated_count(config, names)
    )  # a T5's `n_positions` has no effect


def stated_count(config: Config, names: Sequence[str]) -> int | None:
    """The first of these keys with a positive number, in the config of the decoder, or in the config or its `text_config`."""
    for values in (decoder_config(config), config, config.get("text_config") or {}):
        for name in names:
            stated = values.get(name)
            if type(stated) is int and stated > 0:
                return stated
    return None


def reachable_context(config: Config) -> int | None:
    """The position that a text with skips may reach in a decoder with rotary positions, up to 32,768: its context, or
    less where attention has a window or frequencies change. None if the config does not say.
    """
    config = decoder_config(config)
    limits: list[Any] = [stated_positions(config)]
    for key in ("rope_parameters", "rope_scaling"):
        rotary = config.get(key)
        if isinstance(rotary, Mapping) and rotary.get("rope_type", rotary.get("type")) in (
            "longrope",
            "su",
        ):
            # above this length LongRoPE switches its frequencies, for all texts of a batch at once
            limits.append(config.get(_ORIGINAL) or rotary.get(_ORIGINAL))
    if config.get("use_sliding_window") is not False:
        limits.append(config.get("sliding_window"))
    stated = [limit for limit in limits if isinstance(limit, int) and limit > 0]
    return min(FARTHEST, *stated) if stated else None


def block_length(config: Config) -> int:
    """Number of tokens of a block of text: as many as the model has positions for, up to 2048."""
    return min(LONGEST, stated_positions(config) or LONGEST)
