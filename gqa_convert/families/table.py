"""The search for a record. Other packages read the records of model types from here."""

from gqa_convert.checkpoint.strict_json import Config
from gqa_convert.errors import RemoteCodeError, UnsupportedFamilyError
from gqa_convert.families.family import Family, Modeling
from gqa_convert.families.records import (
    ALL,
    COMPOSITES,
    FAMILIES,
    INNER,
    ONE_OR_ALL_HEADS,
    REFUSALS,
    RESTATED,
    unlisted,
)
from gqa_convert.families.wrappers import decoder_config, is_wrapper, wrapped_family

__all__ = [
    "COMPOSITES",
    "FAMILIES",
    "INNER",
    "REFUSALS",
    "RESTATED",
    "Family",
    "Modeling",
    "check_per_layer_config",
    "family_of",
    "find_family",
]


def family_of(config: Config) -> Family:
    """The record of a checkpoint, which for a wrapper follows from the decoder inside.

    Args:
        config: what config.json holds.

    Raises:
        UnsupportedFamilyError: the model type, or that of the decoder inside, is unknown or can't be converted.
    """
    model_type = config.get("model_type")
    check_per_layer_config(config, "config.json")
    _check_one_number(decoder_config(config))
    if is_wrapper(config):
        return _composite(str(model_type), decoder_config(config)["model_type"])
    if isinstance(model_type, str) and model_type in ONE_OR_ALL_HEADS:
        family = ONE_OR_ALL_HEADS[model_type]
        if config.get(str(family.one_kv_head_key)) is False:
            return family
    if isinstance(model_type, str) and not _is_known(model_type) and type(config.get("num_key_value_heads")) is int:
        return unlisted(model_type)
    return find_family(model_type)


def _is_known(model_type: str) -> bool:
    """Whether a type stands in one of the tables."""
    return any(model_type in table for table in (FAMILIES, INNER, ONE_OR_ALL_HEADS, COMPOSITES, REFUSALS, RESTATED))


def _check_one_number(config: Config) -> None:
    """Refuse the config of a decoder whose layers differ in their K/V heads by `per_layer_config`."""
    stated = config.get("num_key_value_heads")
    if isinstance(stated, list):  # a result of ours, whose own class reads the list
        return
    entries = config.get("per_layer_config") or {}
    counts = {entry.get("num_key_value_heads") for entry in entries.values()} - {None}
    if counts - {stated}:
        raise UnsupportedFamilyError(
            "the layers differ in their number of K/V heads already (per_layer_config): convert the source that they were made of"
        )


def check_per_layer_config(config: Config, where: str) -> None:
    """Refuse a config with values for each layer that transformers' class of the type would load without.

    Args:
        config: what config.json holds.
        where: its path, for the message.

    Raises:
        UnsupportedFamilyError: it has such values.
    """
    stated = decoder_config(config)
    family = ALL.get(str(stated.get("model_type")))
    reads_it = family is not None and family.reads_per_layer_config
    entries = stated.get("per_layer_config")
    if entries and not reads_it:
        raise UnsupportedFamilyError(
            f"{where} has per_layer_config, which transformers' class of {stated.get('model_type')} ignores, so that all "
            "layers would have one number of K/V heads: use the folder that it was made from"
        )


def _composite(wrapper: str, decoder: object) -> Family:
    """The record of a wrapper of a decoder."""
    if isinstance(decoder, str) and decoder in INNER:
        return wrapped_family(wrapper, INNER[decoder])
    try:
        found = find_family(decoder)
    except UnsupportedFamilyError as problem:
        raise UnsupportedFamilyError(f"the decoder inside this {wrapper} can't be converted: {problem}") from None
    return wrapped_family(wrapper, found)


def find_family(model_type: object) -> Family:
    """The record of a model type.

    Raises:
        UnsupportedFamilyError: it is unknown, or known not to be convertible.
    """
    if not isinstance(model_type, str) or not model_type:
        raise UnsupportedFamilyError("config.json names no model_type: name the folder that save_pretrained wrote")
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    if model_type in COMPOSITES:
        raise UnsupportedFamilyError(
            f"model type {model_type} wraps a decoder, whose config is needed too: name the folder of the whole checkpoint"
        )
    if model_type in REFUSALS:
        raise UnsupportedFamilyError(f"model type {model_type} can't be converted: {REFUSALS[model_type]}")
    if model_type in RESTATED:
        raise RemoteCodeError(
            f"model type {model_type} loads only by the code in its checkpoint: `gqa-convert convert SOURCE PLAIN --groups N` "
            f"rewrites it as a {RESTATED[model_type]}, which computes the same, and with SOURCE's own number of K/V heads "
            "changes nothing else"
        )
    raise UnsupportedFamilyError(
        f"model type {model_type!r} is unknown: docs/families.md lists the {len(FAMILIES)} that can be converted, and "
        "docs/adding-a-family.md says how to add one"
    )
