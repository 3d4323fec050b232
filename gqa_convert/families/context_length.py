"""How many tokens a model reads at once: what its config states, and the defaults; which layers
attend to a sliding window of them; and the keys of sizes that all architectures have.
"""

from collections.abc import Sequence
from typing import Any

from gqa_convert.runtime.json_objects import Config

from .composite import SECTIONS, config_value, decoder_config
from .records import record_of

LONGEST = 2048
"""The most tokens of a block or window, even if the model has positions for more."""

SPAN_LENGTH = 512
"""Encoder tokens of an example of span corruption, as T5 was trained."""

FARTHEST = 32_768
"""The position up to which blocks of calibration text are stretched by default, even if the context
is longer.
"""

POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_target_positions",
    "max_seq_len",
    "seq_length",
)
ENCODER_POSITIONS = ("max_source_positions", "max_encoder_position_embeddings", *POSITIONS)

HIDDEN_SIZE_KEYS = ("hidden_size", "d_model", "n_embd")
VOCABULARY_KEYS = ("vocab_size", "padded_vocab_size")

_ORIGINAL = "original_max_position_embeddings"


def stated_positions(config: Config) -> int | None:
    """Number of tokens for which a model has positions (the decoder, in an encoder-decoder); None
    for any number, or where the config does not say.
    """
    # a T5's `n_positions` has no effect
    return None if record_of(config).is_t5 else stated_count(config, POSITIONS)


def intended_length(config: Config, names: Sequence[str] = POSITIONS) -> int | None:
    """Number of tokens that a model was made for; None where the config does not say. A T5 takes
    texts of any length, but was trained on 512 tokens where it states no other number.

    Args:
        config: what config.json holds.
        names: of the keys; `ENCODER_POSITIONS` for the encoder.
    """
    return stated_count(config, names) or (SPAN_LENGTH if record_of(config).is_t5 else None)


def stated_count(config: Config, names: Sequence[str]) -> int | None:
    """The first of these keys with a positive number, in the config of the decoder, or in the
    config or one of its sections.
    """
    sections = [config.get(key) for key in SECTIONS]
    for values in (decoder_config(config), config, *sections):
        for name in names:
            stated = config_value(values, name)
            if type(stated) is int and stated > 0:
                return stated
    return None


def reachable_context(config: Config) -> int | None:
    """The position that a text with skips may reach in a decoder with rotary positions, up to
    32,768: its context, or less where attention has a window or frequencies change. None if the
    config does not say.
    """
    config = decoder_config(config)
    limits: list[Any] = [stated_positions(config)]
    kind, rotary = scaled_positions(config)
    if kind in ("longrope", "su"):
        # above this length LongRoPE switches its frequencies, for all texts of a batch at once
        limits.append(config.get(_ORIGINAL) or rotary.get(_ORIGINAL))
    if config.get("use_sliding_window") is not False:
        limits.append(config.get("sliding_window"))
    stated = [limit for limit in limits if isinstance(limit, int) and limit > 0]
    return min(FARTHEST, *stated) if stated else None


def scaled_positions(config: Config) -> tuple[Any, Config]:
    """How a config scales rotary positions: the kind, `default` where it does not, and all that it
    states about them under the name of either transformers.
    """
    stated: Any = config.get("rope_scaling") or config.get("rope_parameters")
    rotary = stated if isinstance(stated, dict) else {}
    return rotary.get("rope_type", rotary.get("type", "default")), rotary


def block_length(config: Config) -> int:
    """Number of tokens of a block of text: as many as the model has positions for, up to 2048."""
    return min(LONGEST, stated_positions(config) or LONGEST)


def has_window(config: Config) -> bool:
    """Whether a layer attends to a sliding window, and so caches fewer tokens than a text has."""
    config = decoder_config(config)
    kinds = config.get("layer_types")
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return False
    return not isinstance(kinds, list) or "sliding_attention" in kinds


def window_of(config: Config, layer: int) -> int | None:
    """Return the tokens of the sliding window of a decoder layer; None if it attends to the whole
    text.

    Args:
        config: what config.json holds.
        layer: the number of the layer, from 0.
    """
    if not has_window(config):
        return None
    config = decoder_config(config)
    kinds = config.get("layer_types")
    every: Any = config.get("sliding_window_pattern")
    if isinstance(every, str):  # such as LLLG, where G is a layer that attends to the whole text
        every = len(every)
    if isinstance(kinds, list):
        is_full = kinds[layer : layer + 1] != ["sliding_attention"]
    else:
        is_behind = bool(every) and (layer + 1) % every == 0
        is_full = is_behind or layer < (config.get("max_window_layers") or 0)
    return None if is_full else config["sliding_window"]
