"""Merges the layers of a plan, for methods that work on whole layers."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gqa_convert._version import __version__
from gqa_convert.checkpoint.devices import chosen_device
from gqa_convert.checkpoint.headers import TensorEntry
from gqa_convert.checkpoint.provenance import CalibrationRecord, Divergence
from gqa_convert.conversion.fit.calibrated import CalibrationOptions, calibrate, steps_per_layer, steps_together
from gqa_convert.conversion.fit.from_weights import merge_layers
from gqa_convert.conversion.fit.merged_layers import MergedLayers
from gqa_convert.conversion.fit.records import LayerDone, Stage, StageProgress
from gqa_convert.conversion.plan import Plan

__all__ = ["LayerDone", "Merged", "merge_whole_layers"]


@dataclass(frozen=True, slots=True)
class Merged:
    """The tensors of merged layers, and what the record says of the merge."""

    tensors: Mapping[str, tuple[Path, TensorEntry]] = field(default_factory=dict)
    """By name: the safetensors file and the entry of each. Empty where the writer merges."""
    errors: dict[str, float] | None = None
    """By name; None where the writer merges, and measures the errors itself."""
    calibration: CalibrationRecord | None = None
    """The text that was used."""
    head_order: dict[str, list[int]] = field(default_factory=dict)
    """By module: the source's K/V heads in the order in which they were merged, where it is not the source's."""
    device: str = "cpu"
    """On which the work was done."""


def merge_whole_layers(
    plan: Plan, out: Path, options: CalibrationOptions, stack: ExitStack, on_layer: LayerDone
) -> Merged:
    """Merge every layer of a plan whose method works on whole layers; of any other plan none.

    Args:
        plan: of a local checkpoint.
        out: the folder of the result. Merged layers lie in a hidden folder beside it until `stack` is closed; those
            that were measured on text stay there after an error, so that the next run resumes.
        options: of calibration.
        stack: closed once the result is written.
        on_layer: called as each layer is merged.

    Raises:
        GQAConvertError: one of its subclasses.
    """
    if not plan.merge_method.merges_layers:
        return Merged()
    if options.source is None:
        store = stack.enter_context(MergedLayers(out, _fingerprint(plan), keep=False))
        errors = merge_layers(plan, store, on_layer)
        return Merged(store.tensors(len(plan.merged_layers)), errors, None, _head_order(plan, store))
    return _merge_on_text(plan, out, options, stack, on_layer)


def _merge_on_text(plan: Plan, out: Path, options: CalibrationOptions, stack: ExitStack, on_layer: LayerDone) -> Merged:
    from gqa_convert.conversion.fit.layer_walk import fit_checkpoint

    count = len(plan.merged_layers)
    on_layer(0, count, StageProgress(Stage.TEXT, 0, count))
    calibration = calibrate(
        plan,
        options,
        lambda _, done, total: on_layer(0, count, StageProgress(Stage.OWN_TEXT, 0, count, done, total)),
    )
    steps = steps_per_layer(options)
    record = CalibrationRecord(
        text=calibration.description,
        tokens=calibration.tokens,
        sequence_length=calibration.sequence_length,
        seed=options.seed,
        steps=steps,
        digest=calibration.digest,
    )
    fingerprint = _fingerprint(plan) | record.inputs()
    store = stack.enter_context(MergedLayers(out, fingerprint, keep=True))
    settings: dict[str, Any] = {
        "steps": steps,
        "kl_steps": options.kl_steps,
        "kl_rank": options.kl_rank,
        "default_kl_steps": steps_together(options),
        "held_out": calibration.held_out,
        "fresh": calibration.fresh,
    }
    device = chosen_device(options.device)
    fitted = fit_checkpoint(plan, store, calibration.batches, on_layer, **settings, device=device)
    record = replace(record, kl=Divergence(fitted.divergence, fitted.divergence))
    if training := store.finished():
        record = replace(record, kl_steps=training.kl_steps, kl_rank=training.kl_rank, kl=training.kl)
    return Merged(store.tensors(len(plan.merged_layers)), dict(fitted.errors), record, _head_order(plan, store), device)


def _fingerprint(plan: Plan) -> dict[str, Any]:
    """What merged layers depend on, apart from the text."""
    return {
        "version": __version__,
        "source": str(plan.checkpoint.folder),
        "files": [[shard.file, shard.size, shard.modified_ns] for shard in plan.checkpoint.shards],
        "config": plan.checkpoint.config,
        "method": plan.method,
        "groups": plan.stated_groups,
        "modules": [layer.module for layer in plan.layers],
    }


def _head_order(plan: Plan, store: MergedLayers) -> dict[str, list[int]]:
    records = filter(None, map(store.record, range(len(plan.merged_layers))))
    return {record.module: list(record.head_order) for record in records if record.head_order is not None}
