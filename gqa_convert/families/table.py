"""All families by model type, and the search for one. Other rooms read the records of model types from here."""

from collections.abc import Iterable
from typing import Final

from gqa_convert.errors import UnsupportedFamilyError
from gqa_convert.families.family import Family, FamilyRecordError, Modeling, Refusal
from gqa_convert.families.records.decoders import decoders
from gqa_convert.families.records.encoder_decoders import encoder_decoders
from gqa_convert.families.records.hybrids import hybrids
from gqa_convert.families.records.own_file_decoders import own_file_decoders
from gqa_convert.families.records.remote_code import remote_code
from gqa_convert.families.refusals import REFUSALS, RESTATED

__all__ = ["FAMILIES", "REFUSALS", "RESTATED", "Family", "Modeling", "Refusal", "find_family"]


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


def find_family(model_type: object) -> Family:
    """The record of a model type.

    Raises:
        UnsupportedFamilyError: it is unknown, or known not to be convertible.
    """
    if not isinstance(model_type, str) or not model_type:
        raise UnsupportedFamilyError("config.json names no model_type: name the folder that save_pretrained wrote")
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    if model_type in REFUSALS:
        raise UnsupportedFamilyError(f"model type {model_type} can't be converted: {REFUSALS[model_type].reason}")
    if model_type in RESTATED:
        raise UnsupportedFamilyError(
            f"model type {model_type} loads only by the code in its checkpoint and can't be converted directly: `gqa-convert "
            f"restate SOURCE STOCK` rewrites it as a {RESTATED[model_type]}, which computes the same; then convert STOCK"
        )
    raise UnsupportedFamilyError(
        f"model type {model_type!r} is unknown: docs/families.md lists the {len(FAMILIES)} that can be converted, and "
        "docs/adding-a-family.md says how to add one"
    )
