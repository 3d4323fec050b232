"""The number of K/V heads of each layer of a result, from what the user asked for."""

from collections.abc import Sequence

from gqa_convert.conversion.plan.group_counts import merging_counts, repeating_counts
from gqa_convert.errors import GroupsError
from gqa_convert.families.geometry import AttentionFinder
from gqa_convert.families.layerwise import find_form


def layer_groups(finder: AttentionFinder, groups: int | Sequence[int]) -> tuple[int, ...]:
    """N of each layer, in the order of `finder.layers`.

    Args:
        finder: of the source.
        groups: one N for all layers, or that of each layer in the order of the layers' numbers.

    Raises:
        GroupsError: a number does not fit its layer, or their count that of the layers.
    """
    family = finder.family
    if isinstance(groups, int):
        if not family.is_layerwise:
            for kv_heads, heads in dict.fromkeys((layer.kv_heads, layer.heads) for layer in finder.layers):
                _check_groups(groups, kv_heads, heads, family.model_type, one_or_all=family.one_kv_head_key is not None)
            return (groups,) * len(finder.layers)
        groups = [groups] * len(finder.layers)
    if not family.layerwise:
        raise GroupsError(
            f"--groups: all layers of a {family.model_type} have one number of K/V heads: give one; docs/families.md names the "
            "types whose layers may differ"
        )
    if len(groups) != len(finder.layers):
        raise GroupsError(
            f"--groups lists {len(groups)} numbers for the {len(finder.layers)} attention layers of {finder.where.removesuffix('/config.json')}: "
            "list one for each layer"
        )
    for layer in finder.layers:
        count = groups[layer.number]
        if count not in merging_counts(layer.kv_heads):
            raise GroupsError(
                f"--groups states {count} for layer {layer.number}, which does not divide its {layer.kv_heads} K/V heads: "
                f"choose one of {', '.join(map(str, merging_counts(layer.kv_heads)))}"
            )
    found = tuple(groups[layer.number] for layer in finder.layers)
    differ = len(set(found)) > 1 or family.is_layerwise
    if differ and isinstance(reason := find_form(family, finder.config), str):
        raise GroupsError(
            f"--groups: the layers of this {family.model_type} can't differ in their number of K/V heads, since {reason}; give "
            "one number for all layers"
        )
    return found


def _check_groups(groups: int, kv_heads: int, heads: int, model_type: str, *, one_or_all: bool) -> None:
    down, up = merging_counts(kv_heads), repeating_counts(kv_heads, heads)
    if one_or_all:
        down = sorted({1, kv_heads})
    if groups not in down and groups not in up:
        choices = ", ".join(map(str, down)) + (
            f"; or, to repeat heads for tensor parallelism, {', '.join(map(str, up))}" if up else ""
        )
        raise GroupsError(
            f"--groups {groups} does not fit this {model_type} checkpoint with {kv_heads} K/V heads and {heads} query heads: choose one of {choices}"
        )
