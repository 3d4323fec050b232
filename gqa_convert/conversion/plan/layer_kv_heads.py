"""The number of K/V heads of each layer of a result, from what the user asked for."""

from collections.abc import Sequence
from math import gcd

from gqa_convert.errors import GroupsError
from gqa_convert.families.family import Family
from gqa_convert.families.geometry import AttentionFinder, AttentionLayer
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
    step = (len(counts) - 1) / max(1, chosen - 1)
    return [counts[round(place * step)] for place in range(chosen)]


def layer_kv_heads(finder: AttentionFinder, kv_heads: int | Sequence[int]) -> dict[str, int]:
    """N of each layer, by its module, in the order of the layers' numbers.

    Args:
        finder: of the source.
        kv_heads: one N for all layers, or that of each layer in the order of the layers' numbers.

    Raises:
        GroupsError: a number does not fit its layer, or their count that of the layers.
    """
    family = finder.family
    layers = sorted(finder.layers, key=lambda layer: layer.number)
    is_one_number = isinstance(kv_heads, int) and not family.is_layerwise
    counts = [kv_heads] * len(layers) if isinstance(kv_heads, int) else kv_heads
    if not is_one_number and not family.layerwise:
        raise GroupsError(
            f"--kv-heads: all layers of a {family.model_type} have one number of K/V heads: "
            "give one"
        )
    if len(counts) != len(layers):
        raise GroupsError(
            f"--kv-heads lists {len(counts)} numbers for the {len(layers)} attention layers of "
            f"{finder.where.removesuffix('/config.json')}: list one for each layer"
        )
    for layer, count in zip(layers, counts, strict=True):
        _check_fits(family, layer, count, may_repeat=is_one_number)
    if family.is_layerwise or len(set(counts)) > 1:
        _check_may_differ(finder)
    return {layer.module: count for layer, count in zip(layers, counts, strict=True)}


def _check_fits(family: Family, layer: AttentionLayer, count: int, *, may_repeat: bool) -> None:
    """Refuse a number to which a layer's K/V heads can be neither merged nor, if they may be,
    repeated.
    """
    fewer = merging_counts(layer.kv_heads)
    if family.one_kv_head_key:
        fewer = sorted({1, layer.kv_heads})
    choices = ", ".join(map(str, fewer))
    multiples = range(2 * layer.kv_heads, layer.heads + 1, layer.kv_heads)
    more = [number for number in multiples if may_repeat and layer.heads % number == 0]
    if more:
        choices += f"; or, to repeat heads for tensor parallelism, {', '.join(map(str, more))}"
    if count not in (*fewer, *more):
        raise GroupsError(
            f"--kv-heads {count} does not fit this {family.model_type} checkpoint with "
            f"{layer.kv_heads} K/V heads and {layer.heads} query heads in layer {layer.number}: "
            f"choose one of {choices}"
        )


def _check_may_differ(finder: AttentionFinder) -> None:
    """Refuse a checkpoint whose layers can't have numbers of their own."""
    if finder.unused_layers:
        raise GroupsError(
            "--kv-heads: the layers of this checkpoint can't differ in their number of K/V heads, "
            f"since it holds {finder.unused_layers[0].module}, which is none of the layers that "
            "config.json states: give one number for all layers, or remove its tensors"
        )
    reason = find_form(finder.family, finder.config)
    if isinstance(reason, str):
        raise GroupsError(
            f"--kv-heads: the layers of this {finder.family.model_type} can't differ in their "
            f"number of K/V heads, since {reason}; give one number for all layers"
        )
