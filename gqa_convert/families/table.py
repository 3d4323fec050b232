"""The search for a record. Other packages read the records of model types from here."""

from gqa_convert.checkpoint.strict_json import Config
from gqa_convert.errors import RemoteCodeError, UnsupportedFamilyError
from gqa_convert.families.family import Family, Modeling
from gqa_convert.families.records import COMPOSITES, FAMILIES, INNER, ONE_OR_ALL_HEADS, REFUSALS, RESTATED
from gqa_convert.families.wrappers import decoder_config, is_wrapper, wrapped_family

__all__ = ["COMPOSITES", "FAMILIES", "INNER", "REFUSALS", "RESTATED", "Family", "Modeling", "family_of", "find_family"]


def family_of(config: Config) -> Family:
    """The record of a checkpoint, which for a wrapper follows from the decoder inside.

    Args:
        config: what config.json holds.

    Raises:
        UnsupportedFamilyError: the model type, or that of the decoder inside, is unknown or can't be converted.
    """
    model_type = config.get("model_type")
    if is_wrapper(config):
        return _composite(str(model_type), decoder_config(config)["model_type"])
    if isinstance(model_type, str) and model_type in ONE_OR_ALL_HEADS:
        family = ONE_OR_ALL_HEADS[model_type]
        if config.get(str(family.one_kv_head_key)) is False:
            return family
    return find_family(model_type)


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
