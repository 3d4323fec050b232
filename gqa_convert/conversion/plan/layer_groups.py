"""The number of K/V heads of each layer of a result, from what the user asked for."""

from collections.abc import Sequence
from math import gcd

from gqa_convert.errors import GroupsError
from gqa_convert.families.geometry import AttentionFinder
from gqa_convert.families.layerwise import find_form


def merging_counts(*kv_heads: int) -> list[int]:
    """Every N that merges, or keeps, the K/V heads of all layers evenly, rising.

    Args:
        kv_heads: K/V heads of the source; several numbers where layers differ.
    """
    return [count for count in range(1, max(kv_heads) + 1) if gcd(*kv_heads) % count == 0]


def spread(counts: Sequence[int], most: int) -> list[int]:
    """At most so many of the counts, evenly spread, the first and the last among them."""
    chosen = min(most, len(counts))
    return [
        counts[round(place * (len(counts) - 1) / max(1, chosen - 1))] for place in range(chosen)
    ]


def layer_groups(finder: AttentionFinder, groups: int | Sequence[int]) -> dict[str, int]:
    """N of each layer, by its module, in the order of the layers' numbers.

    Args:
        finder: of the source.
        groups: one N for all layers, or that of each layer in the order of the layers' numbers.

    Raises:
        GroupsError: a number does not fit its layer, or their count that of the layers.
    """
    family = finder.family
    layers = sorted(finder.layers, key=lambda layer: layer.number)
    is_one_number = isinstance(groups, int) and not family.is_layerwise
    counts = [groups] * len(layers) if isinstance(groups, int) else groups
    if not is_one_number and not family.layerwise:
        raise GroupsError(
            f"--groups: all layers of a {family.model_type} have one number of K/V heads: give one"
        )
    if len(counts) != len(layers):
        raise GroupsError(
            f"--groups lists {len(counts)} numbers for the {len(layers)} attention layers of "
            f"{finder.where.removesuffix('/config.json')}: list one for each layer"
        )
    for layer, count in zip(layers, counts, strict=True):
        fewer, more = merging_counts(layer.kv_heads), []
        if family.one_kv_head_key:
            fewer = sorted({1, layer.kv_heads})
        if is_one_number:
            repeated = range(2 * layer.kv_heads, layer.heads + 1, layer.kv_heads)
            more = [number for number in repeated if layer.heads % number == 0]
        if count not in (*fewer, *more):
            choices = ", ".join(map(str, fewer))
            if more:
                choices += (
                    f"; or, to repeat heads for tensor parallelism, {', '.join(map(str, more))}"
                )
            raise GroupsError(
                f"--groups {count} does not fit this {family.model_type} checkpoint with {layer.kv_heads} K/V heads and {layer.heads} query "
                f"heads in layer {layer.number}: choose one of {choices}"
            )
    if family.is_layerwise or len(set(counts)) > 1:
        if finder.unused_layers:
            raise GroupsError(
                f"--groups: the layers of this checkpoint can't differ in their number of K/V heads, since it holds {finder.unused_layers[0].module}, "
                "which is none of the layers that config.json states: give one number for all layers, or remove its tensors"
            )
        reason = find_form(family, finder.config)
        if isinstance(reason, str):
            raise GroupsError(
                f"--groups: the layers of this {family.model_type} can't differ in their number of K/V heads, since {reason}; "
                "give one number for all layers"
            )
    return {layer.module: count for layer, count in zip(layers, counts, strict=True)}
