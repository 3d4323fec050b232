"""Merges a checkpoint's attention layers one by one from the weights alone. Needs no torch."""

from dataclasses import asdict

import numpy as np

from gqa_convert.conversion.fit.progress import MERGING_LAYERS, FitProgress, OnProgress
from gqa_convert.conversion.layers.layer_store import LayerRecord, LayerStore, layer_key
from gqa_convert.conversion.layers.source_layers import open_layers
from gqa_convert.conversion.plan import Plan
from gqa_convert.merging.head_grouping import find_head_order, reconstruction_errors, reorder_heads
from gqa_convert.merging.merge_layer import Moments, merge_layer


def merge_layers(plan: Plan, store: LayerStore, on_progress: OnProgress) -> None:
    """Merge every layer by the plan's method, from the weights alone, with one layer in memory at a time.

    Args:
        plan: of method `factor`.
        store: where merged layers go; those that it holds already are not merged again.
        on_progress: called as each is done.

    Raises:
        NonFiniteError: a tensor holds NaN or Inf, or would hold numbers too large for its type.
    """
    with open_layers(plan) as read_layer:
        for number, (layer, groups) in enumerate(plan.merged_layers):
            record = store.layer(number)
            if record is None:
                source, unmeasured = read_layer(layer), Moments()
                heads = source.layout.split_heads(source.tensors)
                order = find_head_order(heads, groups, source.limits, unmeasured)
                heads = reorder_heads(heads, order)
                merged = merge_layer(heads, groups, source.limits, unmeasured)
                keys, values = reconstruction_errors(heads, merged, source.limits, unmeasured)
                errors = {f"{layer.module}.keys": keys, f"{layer.module}.values": values}
                record = LayerRecord(layer.module, errors, order.tolist())
                wide = {name: array.astype(np.float64) for name, array in source.tensors.items()}
                tensors = source.layout.in_result_types(
                    source.layout.merge_heads(merged, wide, groups)
                )
                store.write(layer_key(number), tensors, asdict(record))
            on_progress(
                FitProgress(MERGING_LAYERS, number + 1, len(plan.merged_layers), layer=record)
            )
