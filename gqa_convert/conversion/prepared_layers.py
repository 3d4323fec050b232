"""Merges the layers of a plan, for methods that work on whole layers, so that the writer finds them
ready: from the weights alone here, on calibration data by `fitting`.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from gqa_convert._version import __version__
from gqa_convert.checkpoint.provenance import CalibrationRecord
from gqa_convert.merging.attention_heads import Tensors
from gqa_convert.merging.head_grouping import find_head_order, reorder_heads
from gqa_convert.merging.merge_layer import Moments, merge_layer
from gqa_convert.runtime.json_objects import JsonObject
from gqa_convert.runtime.machine import chosen_device

from .layers.layer_store import TOGETHER, LayerRecord, LayerStore, layer_key
from .layers.source_layers import SourceLayer, layouts_of, open_layers
from .options import CalibrationOptions
from .plan import Plan
from .progress import MERGING_LAYERS, FitProgress, OnProgress


@dataclass(frozen=True, slots=True)
class PreparedLayers:
    """Layers that were merged before the writer runs, and what the result's record says of them.

    Attributes:
        tensors: by the names of the result's tensors: the file that holds each.
        errors: of layers that were merged on calibration data, by their names in the record.
        calibration: what the source was run on.
        head_order: by module: the source's K/V heads in the order in which they were merged, where
            it is not the source's.
        device: on which the work was done.
    """

    tensors: Mapping[str, Path] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    calibration: CalibrationRecord | None = None
    head_order: dict[str, list[int]] = field(default_factory=dict)
    device: str = "cpu"


def prepare_layers(
    plan: Plan, out: Path, options: CalibrationOptions, stack: ExitStack, on_progress: OnProgress
) -> PreparedLayers:
    """Merge every layer of a plan whose method works on whole layers; of any other plan none.

    Args:
        plan: of a local checkpoint.
        out: the folder of the result. Merged layers lie in a hidden folder beside it until `stack`
            is closed; those that were measured on calibration data stay there after an error, so
            that the next run resumes.
        options: of calibration.
        stack: closed once the result is written.
        on_progress: called as the work goes on.

    Raises:
        GQAConvertError: one of its subclasses.
    """
    if not plan.merge_method.merges_layers:
        return PreparedLayers()
    store = stack.enter_context(LayerStore(out, _fingerprint(plan), keep=options.has_data))
    if not options.has_data:
        _merge_weights(plan, store, on_progress)
        return _collected(plan, store, None, "cpu")
    from .fitting import fit_on_data  # imports torch

    record = fit_on_data(plan, store, options, on_progress)
    return _collected(plan, store, record, chosen_device(options.device))


def _fingerprint(plan: Plan) -> JsonObject:
    """What merged layers depend on beside calibration data."""
    origin = plan.checkpoint.origin
    return {
        "version": __version__,
        "source": str(origin.folder),
        "files": [[shard.file, shard.size, shard.modified_ns] for shard in origin.shards],
        "config": plan.checkpoint.config,
        "method": plan.method,
        "kv_heads": plan.stated_kv_heads,
        "modules": [layer.module for layer in plan.layers],
    }


def _collected(
    plan: Plan, store: LayerStore, record: CalibrationRecord | None, device: str
) -> PreparedLayers:
    """What the store holds of all layers of a plan."""
    files: dict[str, Path] = {}
    errors: dict[str, float] = {}
    head_order: dict[str, list[int]] = {}
    for number in range(len(plan.merged_layers)):
        layer = store.layer(number)
        assert layer is not None
        files |= store.files(layer_key(number))
        errors |= layer.errors
        if layer.head_order != sorted(layer.head_order):
            head_order[layer.module] = layer.head_order
    if store.record(TOGETHER) is not None:
        files |= store.files(TOGETHER)
    return PreparedLayers(files, errors, record, head_order, device)


# From the weights alone


def _merge_weights(plan: Plan, store: LayerStore, on_progress: OnProgress) -> None:
    """Merge every layer by the plan's method, with one layer in memory at a time. Needs no torch.

    Args:
        plan: of method `factor`.
        store: where merged layers go; those that it holds already are not merged again.
        on_progress: called as each is done.

    Raises:
        NonFiniteError: a tensor holds NaN or Inf, or would hold numbers too large for its type.
    """
    layouts = layouts_of(plan)
    with open_layers(plan) as read_layer:
        for number, (layer, kv_heads) in enumerate(plan.merged_layers):
            record = store.layer(number)
            if record is None:
                tensors, record = _merged_by_weights(read_layer(layouts[layer.module]), kv_heads)
                store.write(layer_key(number), tensors, asdict(record))
            done = number + 1
            on_progress(FitProgress(MERGING_LAYERS, done, len(plan.merged_layers), layer=record))


def _merged_by_weights(source: SourceLayer, kv_heads: int) -> tuple[Tensors, LayerRecord]:
    """The tensors of a merged layer as they are published, and its record."""
    limits, unmeasured = source.limits, Moments()
    heads = source.layout.split_heads(source.tensors)
    order = find_head_order(heads, kv_heads, limits, unmeasured)
    heads = reorder_heads(heads, order)
    merged = merge_layer(heads, kv_heads, limits, unmeasured)
    wide = {name: array.astype(np.float64) for name, array in source.tensors.items()}
    joined = source.layout.merge_heads(merged, wide, kv_heads)
    record = LayerRecord(source.layout.layer.module, {}, order.tolist())
    return source.layout.in_result_types(joined), record
