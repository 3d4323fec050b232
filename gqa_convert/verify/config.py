"""The check on OUT's config where OUT has SOURCE's model type or comes with a modelling file."""

import copy
from typing import Any

from gqa_convert.families.family import Family, LegacyConfigKeys, Modeling
from gqa_convert.families.wrappers import SECTION
from gqa_convert.verify.checkpoint_reader import CONFIG
from gqa_convert.verify.geometry import Geometry
from gqa_convert.verify.json_values import check_same_object
from gqa_convert.verify.layerwise import block_keys, is_decilm, without_windows
from gqa_convert.verify.legacy_config_keys import legacy_keys
from gqa_convert.verify.modelling_file import modelling_file, modelling_keys
from gqa_convert.verify.report import Finding

CONVENTION = ("multi_query_attention", "multi_query_group_num")
"""ChatGLM2's keys for grouped-query attention, which every OUT has."""


def check_config(
    config: dict[str, Any], original: dict[str, Any], family: Family, geometry: Geometry, encoder: bool
) -> Finding:
    """OUT's config is SOURCE's, except for the number of K/V heads, which is that of the tensors, and for the keys that
    lead to a modelling file.

    Args:
        config: OUT's config.
        original: SOURCE's config.
        family: SOURCE's family.
        geometry: of both checkpoints.
        encoder: whether an encoder was converted.
    """
    if family.wrapped:
        return _check_wrapper(config, original, family, geometry.after)
    modeling = modelling_file(family, geometry)
    groups = [counts.after for counts in geometry.every] if geometry.form else geometry.after
    changes = _changes(original, family, modeling, groups, encoder)
    expected = copy.deepcopy(original)
    if geometry.form and is_decilm(geometry.form):
        assert isinstance(groups, list)
        changes |= block_keys(config, original, groups)
        expected = without_windows(expected)
    if modeling is None or is_decilm(modeling):
        expected |= legacy_keys(original, family.legacy)
    for dotted, value in changes.items():
        *parents, last = dotted.split(".")
        section = expected
        for key in parents:
            section = section.setdefault(key, {})
        section[last] = value
    check_same_object(CONFIG, config, expected)
    numbers = {} if geometry.form else {"groups": geometry.after}
    shown = geometry.change() if geometry.form else geometry.after
    return Finding(f"SOURCE's, except for {', '.join(changes)} ({shown} groups)", numbers)


def _check_wrapper(config: dict[str, Any], original: dict[str, Any], family: Family, groups: int) -> Finding:
    """The same for a wrapper: the numbers stand in its decoder's config, and beside it only where SOURCE repeats them."""
    expected = copy.deepcopy(original)
    nested = expected[SECTION] if isinstance(original.get(SECTION), dict) else expected
    changes = dict.fromkeys(family.kv_heads_keys, groups) | dict(zip(CONVENTION, (True, groups), strict=True))
    for key in family.kv_heads_keys:
        if key in expected:
            expected[key] = groups
    nested |= legacy_keys(nested, family.legacy) | changes
    if nested is not expected:
        expected |= legacy_keys(original, LegacyConfigKeys())
    check_same_object(CONFIG, config, expected)
    where = f" of {SECTION}" if nested is not expected else ""
    return Finding(f"SOURCE's, except for {', '.join(changes)}{where} ({groups} groups)", {"groups": groups})


def _changes(
    original: dict[str, Any], family: Family, modeling: Modeling | None, groups: int | list[int], encoder: bool
) -> dict[str, Any]:
    """Dotted keys whose values the conversion sets."""
    changes: dict[str, Any] = {}
    if family.modeling is None or modeling is not None:  # stock classes of the other types do not know these keys
        changes |= dict.fromkeys(family.kv_heads_keys, groups)
        changes |= {family.encoder_kv_heads_key: groups} if encoder else {}
        changes |= {family.one_kv_head_key: groups == 1} if family.one_kv_head_key else {}
    changes |= dict(zip(CONVENTION, (True, groups), strict=True))
    if modeling is not None:
        changes |= modelling_keys(modeling, original)
    return changes
