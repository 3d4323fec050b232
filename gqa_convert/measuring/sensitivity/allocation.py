"""Measures what merging costs in each layer alone, and compares lists of K/V heads within a budget with all layers merged."""

from collections.abc import Callable
from functools import partial

from gqa_convert.checkpoint.item_bytes import ITEM_BYTES
from gqa_convert.conversion.plan import merging_counts
from gqa_convert.measuring.sensitivity.choice import HeadAllocation
from gqa_convert.measuring.sensitivity.kv_budget import LayerCosts, largest_uniform, least_sum
from gqa_convert.measuring.sensitivity.merged_copies import Copy, SensitivityInputs, score_copies

Progress = Callable[[str, int, int], None]


def measure_costs(inputs: SensitivityInputs, progress: Progress) -> list[LayerCosts]:
    """The divergences on the first held-out batch with one layer alone merged, in the order of the layers' numbers.

    Args:
        inputs: the source and the text.
        progress: called with the name of a stage, the steps done and the number of steps.
    """
    layers = sorted(inputs.layers, key=lambda layer: layer.number)
    copies: list[Copy] = []
    for layer in layers:
        copies += [{layer.module: groups} for groups in merging_counts(layer.kv_heads)[:-1]]
    _, *scores = score_copies(inputs, copies, inputs.held_out[:1], partial(progress, "each layer alone"))
    costs = []
    for layer in layers:
        head_bytes = (layer.key_head_dim + layer.value_head_dim) * ITEM_BYTES[layer.dtype]
        kl = {groups: scores.pop(0).kl for groups in merging_counts(layer.kv_heads)[:-1]}
        costs.append(LayerCosts(layer.module, layer.kv_heads, head_bytes, kl))
    return costs


def measure_candidates(
    inputs: SensitivityInputs, layers: list[LayerCosts], limit: int, progress: Progress
) -> list[HeadAllocation]:
    """The largest number of K/V heads that fits all layers, and the list with the least sum of costs if it is another one,
    measured with all layers merged on all held-out text.

    Args:
        inputs: the source and the text.
        layers: what merging costs in each layer alone.
        limit: bytes of K/V cache per token that all layers may take together.
        progress: called with the name of a stage, the steps done and the number of steps.
    """
    rules = {largest_uniform(layers, limit): "uniform"}
    rules.setdefault(least_sum(layers, limit), "least sum of divergences")
    copies: list[Copy] = []
    for numbers in rules:
        pairs = zip(layers, numbers, strict=True)
        copies.append({layer.module: groups for layer, groups in pairs if groups != layer.kv_heads})
    _, *scores = score_copies(inputs, copies, inputs.held_out, partial(progress, "candidates"))
    candidates = []
    for (numbers, rule), score in zip(rules.items(), scores, strict=True):
        taken = sum(groups * layer.head_bytes for layer, groups in zip(layers, numbers, strict=True))
        candidates.append(HeadAllocation(rule, numbers, taken, score.kl))
    return candidates
