"""All families by model type, and the search for one. Other rooms read the records of model types from here."""

from collections.abc import Iterable
from typing import Final

from gqa_convert.checkpoint.strict_json import Config
from gqa_convert.errors import RemoteCodeError, UnsupportedFamilyError
from gqa_convert.families.family import Family, FamilyRecordError, Modeling, Refusal
from gqa_convert.families.records.decoders import decoders, one_or_all_heads
from gqa_convert.families.records.encoder_decoders import encoder_decoders
from gqa_convert.families.records.hybrids import hybrids
from gqa_convert.families.records.own_file_decoders import own_file_decoders
from gqa_convert.families.records.remote_code import remote_code
from gqa_convert.families.records.wrappers import WRAPPERS, inner_decoders
from gqa_convert.families.refusals import REFUSALS, RESTATED
from gqa_convert.families.wrappers import decoder_config, is_wrapper, wrapped_family

__all__ = ["FAMILIES", "REFUSALS", "RESTATED", "Family", "Modeling", "Refusal", "family_of", "find_family"]


def _by_type(*kinds: Iterable[Family]) -> dict[str, Family]:
    found: dict[str, Family] = {}
    for kind in kinds:
        for family in kind:
            if family.model_type in found:
                raise FamilyRecordError(family.model_type, "stands twice in the table")
            found[family.model_type] = family
    return found


FAMILIES: Final = _by_type(decoders(), hybrids(), remote_code(), encoder_decoders(), own_file_decoders())
"""Every model type that can be converted, with those of results that have a modelling file."""


INNER: Final = _by_type(inner_decoders())
"""Decoders that exist only inside a wrapper."""


ONE_OR_ALL_HEADS: Final = _by_type(one_or_all_heads())
"""Types that have either one K/V head or as many as query heads. Those with one have nothing to merge."""


def family_of(config: Config) -> Family:
    """The record of a checkpoint, which for a wrapper follows from the decoder inside.

    Args:
        config: what config.json holds.

    Raises:
        UnsupportedFamilyError: the model type, or that of the decoder inside, is unknown or can't be converted.
    """
    if not is_wrapper(config):
        model_type = config.get("model_type")
        special = ONE_OR_ALL_HEADS.get(model_type) if isinstance(model_type, str) else None
        if special is not None and config.get(str(special.one_kv_head_key)) is False:
            return special
        return find_family(model_type)
    wrapper, decoder = config["model_type"], decoder_config(config)["model_type"]
    if decoder in INNER:
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
    if model_type in WRAPPERS:
        raise UnsupportedFamilyError(
            f"model type {model_type} wraps a decoder, whose config is needed too: name the folder of the whole checkpoint"
        )
    if model_type in REFUSALS:
        raise UnsupportedFamilyError(f"model type {model_type} can't be converted: {REFUSALS[model_type].reason}")
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
