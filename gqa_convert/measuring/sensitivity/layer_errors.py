"""The errors of the closed form in single attention layers. Needs no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gqa_convert.conversion.fit.source_layers import SourceLayer
from gqa_convert.merging.attention_heads import Heads
from gqa_convert.merging.merge_layer import Moments, merge_layer
from gqa_convert.merging.reconstruction_error import reconstruction_errors


@dataclass(frozen=True, slots=True)
class MergeErrors:
    """Relative errors (root mean square) of a layer that is merged into `groups` K/V heads.

    Attributes:
        groups: K/V heads.
        keys: of the attention scores, over all distances.
        values: of what the values add to the output.
    """

    groups: int
    keys: float
    values: float


@dataclass(frozen=True, slots=True)
class InspectedLayer:
    """One attention layer.

    Attributes:
        module: its name in the checkpoint.
        label: its number, and its kind unless it is a decoder's self-attention.
        kv_heads: of the source.
        errors: of the closed form, in the order of the candidates.
    """

    module: str
    label: str
    kv_heads: int
    errors: tuple[MergeErrors, ...]


def merge_candidates(
    layer: SourceLayer, candidates: Sequence[int], moments: Moments
) -> Iterator[tuple[Heads, MergeErrors]]:
    """Merge a layer into each number of K/V heads by the closed form, one in memory at a time.

    Args:
        layer: of the source.
        candidates: the numbers of K/V heads.
        moments: of the layer's inputs.
    """
    source = layer.layout.split_heads(layer.tensors)
    for groups in candidates:
        merged = merge_layer(source, groups, layer.limits, moments)
        keys, values = reconstruction_errors(source, merged, layer.limits, moments)
        yield merged, MergeErrors(groups, keys, values)


def describe_layer(layer: SourceLayer, errors: Sequence[MergeErrors]) -> InspectedLayer:
    """The record of a layer and its errors."""
    attention = layer.layout.layer
    label = str(attention.number)
    if attention.attention_kind != "decoder":
        label = f"{label} {attention.attention_kind}"
    return InspectedLayer(attention.module, label, attention.kv_heads, tuple(errors))
