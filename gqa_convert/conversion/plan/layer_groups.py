"""The number of K/V heads of each layer of a result, from what the user asked for."""

from collections.abc import Sequence
from math import gcd

from gqa_convert.errors import GroupsError
from gqa_convert.families.geometry import AttentionFinder
from gqa_convert.families.layerwise import find_form, kinds_of_layers


def merging_counts(*kv_heads: int) -> list[int]:
    """Every N that merges, or keeps, the K/V heads of all layers evenly, rising.

    Args:
        kv_heads: K/V heads of the source; several numbers where layers differ.
    """
    return [count for count in range(1, max(kv_heads) + 1) if gcd(*kv_heads) % count == 0]


def spread(counts: Sequence[int], most: int) -> list[int]:
    """At most so many of the counts, evenly spread, the first and the last among them."""
    chosen = min(most, len(counts))
    return [counts[round(place * (len(counts) - 1) / max(1, chosen - 1))] for place in range(chosen)]


def layer_groups(finder: AttentionFinder, groups: int | Sequence[int]) -> dict[str, int]:
    """N of each layer, by its module.

    Args:
        finder: of the source.
        groups: one N for all layers, or that of each layer in the order of the layers' numbers.

    Raises:
        GroupsError: a number does not fit its layer, or their count that of the layers.
    """
    layers = finder.layers
    if isinstance(groups, int) and not finder.family.is_layerwise:
        _check_one_number(finder, groups)
        return {layer.module: groups for layer in layers}
    listed = [groups] * len(layers) if isinstance(groups, int) else groups
    _check_list(finder, listed)
    return {layer.module: listed[layer.number] for layer in layers}


def _check_one_number(finder: AttentionFinder, groups: int) -> None:
    """Check that every layer can have so many K/V heads."""
    for layer in finder.layers:
        fewer = merging_counts(layer.kv_heads)
        if finder.family.one_kv_head_key is not None:
            fewer = sorted({1, layer.kv_heads})
        repeated = range(2 * layer.kv_heads, layer.heads + 1, layer.kv_heads)
        more = [count for count in repeated if layer.heads % count == 0]
        if groups in fewer or groups in more:
            continue
        choices = ", ".join(map(str, fewer))
        if more:
            choices += f"; or, to repeat heads for tensor parallelism, {', '.join(map(str, more))}"
        raise GroupsError(
            f"--groups {groups} does not fit this {finder.family.model_type} checkpoint with {layer.kv_heads} K/V heads and "
            f"{layer.heads} query heads: choose one of {choices}"
        )


def _check_list(finder: AttentionFinder, groups: Sequence[int]) -> None:
    """Check that the layers can have their numbers of K/V heads, and that the result has a form."""
    family, layers = finder.family, finder.layers
    if not family.layerwise and not family.reads_per_layer_config:
        raise GroupsError(
            f"--groups: all layers of a {family.model_type} have one number of K/V heads: give one; docs/supported-models.md names the "
            "types whose layers may differ"
        )
    if len(groups) != len(layers):
        raise GroupsError(
            f"--groups lists {len(groups)} numbers for the {len(layers)} attention layers of "
            f"{finder.where.removesuffix('/config.json')}: list one for each layer"
        )
    for layer in layers:
        possible = merging_counts(layer.kv_heads)
        if groups[layer.number] not in possible:
            raise GroupsError(
                f"--groups states {groups[layer.number]} for layer {layer.number}, which does not divide its "
                f"{layer.kv_heads} K/V heads: choose one of {', '.join(map(str, possible))}"
            )
    if family.reads_per_layer_config:
        by_kind: dict[str, int] = {}
        for number, (kind, count) in enumerate(zip(kinds_of_layers(finder.config), groups, strict=False)):
            if by_kind.setdefault(kind, count) != count:
                raise GroupsError(
                    f"--groups: all layers of a {family.model_type} with {kind.replace('_', ' ')} have one number of K/V heads: "
                    f"layer {number} states {count}, and one before it {by_kind[kind]}"
                )
    elif len(set(groups)) > 1 or family.is_layerwise:
        reason = find_form(family, finder.config)
        if isinstance(reason, str):
            raise GroupsError(
                f"--groups: the layers of this {family.model_type} can't differ in their number of K/V heads, since {reason}; "
                "give one number for all layers"
            )
