"""The decoder inside a composite model, such as a vision-language or speech model: its config."""

from typing import Any

from gqa_convert.runtime.json_objects import Config, JsonObject

from .records import COMPOSITES, record_of

SECTIONS = ("text_config", "decoder_config", "decoder")
"""Config keys of the decoder's own config; the first that is stated counts."""

PREFIXES = (
    "language_model.model.",
    "model.language_model.model.",
    "model.language_model.",
    "language_model.",
    "model.text_model.",
    "text_model.",
    "model.decoder.",
    "decoder.",
    "model.",
)
"""What stands in front of the decoder's layers: in files of transformers 4 and 5, in memory, and
without a head.
"""


def is_composite(config: Config) -> bool:
    """Whether a config.json belongs to a model that wraps a decoder of another type."""
    return str(config.get("model_type")) in COMPOSITES


def decoder_section(config: Config) -> str | None:
    """The key of the decoder's own config in a config.json; None where the config itself is the
    decoder's.

    Early configs of composite models such as qwen2_vl state the decoder's keys beside their own.
    """
    if not is_composite(config):
        return None
    return next((key for key in SECTIONS if isinstance(config.get(key), dict)), None)


def decoder_config(config: Config) -> JsonObject:
    """The config of the model's decoder, with what it leaves to the defaults of its class: of a
    composite model the nested config, of any other model the config itself.

    Args:
        config: what config.json holds.
    """
    section = decoder_section(config)
    stated = dict(config[section] if section else config)
    if is_composite(config) and not (section and stated.get("model_type")):
        stated["model_type"] = COMPOSITES[config["model_type"]]
    return {**record_of(stated).defaults, **stated}


def config_value(config: Config | None, dotted: str) -> Any:
    """The value at a dotted key, or None."""
    value: Any = config
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value
