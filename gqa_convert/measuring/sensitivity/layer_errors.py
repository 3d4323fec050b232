"""The errors of the closed form in single attention layers. Needs no torch."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from gqa_convert.checkpoint.source_files import SourceFiles
from gqa_convert.conversion.fit.source_layer import SourceLayer, attention_of, read_source_layer
from gqa_convert.conversion.plan import Plan
from gqa_convert.families.geometry import AttentionLayer
from gqa_convert.merging.attention_heads import Heads
from gqa_convert.merging.merge_layer import Moments, merge_layer
from gqa_convert.merging.reconstruction_error import reconstruction_errors

ReadLayer = Callable[[AttentionLayer], SourceLayer]
"""Reads a layer of the source into memory."""


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


@contextmanager
def open_layers(plan: Plan) -> Iterator[ReadLayer]:
    """Open the weight files of a plan's source; yields what reads one layer."""
    finder = attention_of(plan)
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gqa-inspect-")))
        files = SourceFiles(plan.checkpoint, work, stack)
        yield lambda layer: read_source_layer(finder, layer, plan.limits_of(layer), files)


def merge_candidates(
    layer: SourceLayer, source: Heads, candidates: Sequence[int], moments: Moments
) -> Iterator[tuple[Heads, MergeErrors]]:
    """Merge a layer into each number of K/V heads by the closed form, one in memory at a time.

    Args:
        layer: of the source.
        source: its heads.
        candidates: the numbers of K/V heads.
        moments: of the layer's inputs.
    """
    for groups in candidates:
        merged = merge_layer(source, groups, layer.constraints, moments)
        keys, values = reconstruction_errors(source, merged, layer.constraints, moments)
        yield merged, MergeErrors(groups, keys, values)


def describe_layer(layer: SourceLayer, errors: Sequence[MergeErrors]) -> InspectedLayer:
    """The record of a layer and its errors."""
    attention = layer.layout.layer
    label = str(attention.number)
    if attention.attention_kind != "decoder":
        label = f"{label} {attention.attention_kind}"
    return InspectedLayer(attention.module, label, attention.kv_heads, tuple(errors))
