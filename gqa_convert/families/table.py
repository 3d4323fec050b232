"""The search for a record. Other packages read the records of model types from here."""

from dataclasses import replace

from gqa_convert.errors import UnsupportedFamilyError
from gqa_convert.runtime.json_objects import Config

from .composite import PREFIXES, decoder_config, is_composite
from .family import Family, Modeling
from .records import ALL, COMPOSITES, FAMILIES, INNER, NO_ENGINES, REFUSALS, record_of, unlisted

__all__ = [
    "COMPOSITES",
    "FAMILIES",
    "INNER",
    "REFUSALS",
    "Family",
    "Modeling",
    "check_per_layer_config",
    "family_of",
    "find_family",
]


def family_of(config: Config) -> Family:
    """The record of a checkpoint, which for a composite model follows from the decoder inside.

    Args:
        config: what config.json holds.

    Raises:
        UnsupportedFamilyError: the model type, or that of the decoder inside, is unknown or can't
            be converted; or the decoder has no form with fewer K/V heads that the composite model's
            class can hold.
    """
    check_per_layer_config(config, "config.json")
    model_type = config.get("model_type")
    decoder = decoder_config(config)
    stated = decoder.get("num_key_value_heads")
    layers = (decoder.get("per_layer_config") or {}).values()
    if any(layer.get("num_key_value_heads") not in (None, stated) for layer in layers):
        raise UnsupportedFamilyError(
            "the layers differ in their number of K/V heads already (per_layer_config): convert "
            "the source that they were made of"
        )
    if is_composite(config):
        try:
            inside = INNER.get(decoder["model_type"]) or find_family(decoder["model_type"])
        except UnsupportedFamilyError as problem:
            raise UnsupportedFamilyError(
                f"the decoder inside this {model_type} can't be converted: {problem}"
            ) from None
        if not inside.native or inside.encoder is not None or inside.kv_heads != "stated":
            raise UnsupportedFamilyError(
                f"model type {model_type} can't be converted with a {inside.model_type} inside: "
                f"transformers has no class of {inside.model_type} with a K/V-head count, and a "
                "modelling file can't stand inside another model"
            )
        # the decoder's, found only behind the prefixes of one inside another model
        name = str(model_type)
        return replace(
            inside,
            model_type=name,
            prefixes=PREFIXES,
            is_composite=True,
            layerwise=(),
            **NO_ENGINES,
        )
    record = record_of(config)
    if config.get(record.one_kv_head_key) is False:
        return record
    if isinstance(model_type, str) and model_type not in ALL | REFUSALS and type(stated) is int:
        return unlisted(model_type)
    return find_family(model_type)


def check_per_layer_config(config: Config, where: str) -> None:
    """Refuse a config with values for each layer that transformers' class of the type would load
    without.

    Args:
        config: what config.json holds.
        where: its path, for the message.

    Raises:
        UnsupportedFamilyError: it has such values.
    """
    decoder = decoder_config(config)
    if decoder.get("per_layer_config") and not record_of(decoder).reads_per_layer_config:
        raise UnsupportedFamilyError(
            f"{where} has per_layer_config, which transformers' class of "
            f"{decoder.get('model_type')} ignores, so that all layers would have one number of K/V "
            "heads: use the folder that it was made from"
        )


def find_family(model_type: object) -> Family:
    """The record of a model type.

    Raises:
        UnsupportedFamilyError: it is unknown, or known not to be convertible.
    """
    if not isinstance(model_type, str) or not model_type:
        raise UnsupportedFamilyError(
            "config.json names no model_type: name the folder that save_pretrained wrote"
        )
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    if model_type in COMPOSITES:
        raise UnsupportedFamilyError(
            f"model type {model_type} wraps a decoder, whose config is needed too: name the folder "
            "of the whole checkpoint"
        )
    if model_type in REFUSALS:
        raise UnsupportedFamilyError(
            f"model type {model_type} can't be converted: {REFUSALS[model_type]}"
        )
    raise UnsupportedFamilyError(
        f"model type {model_type!r} is unknown, none of the {len(FAMILIES)} that can be converted: "
        "convert a checkpoint of another type, or add a record of this one"
    )
