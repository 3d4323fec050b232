"""Estimates the memory and the disk space of a conversion from the sizes in headers and config."""

import math
from dataclasses import dataclass
from typing import Any

from gqa_convert.checkpoint.devices import chosen_device, has_gpu_driver
from gqa_convert.checkpoint.machine import available_memory
from gqa_convert.checkpoint.results import Result
from gqa_convert.conversion.fit.calibrated import (
    BATCH_TOKENS,
    KEPT_BYTES,
    CalibrationOptions,
    steps_per_layer,
    steps_together,
)
from gqa_convert.conversion.fit.limits import chosen_rank, has_room, hidden_size_of, must_recompute, trained_model
from gqa_convert.conversion.plan import Plan

_BASE = 450 << 20
"""Bytes of a process that has imported torch and transformers."""
_NUMPY_BASE = 60 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs(Result):
    """What a conversion is estimated to need on this machine."""

    work: str
    """The method, and the number of tokens where it uses text."""
    layers: int
    """Layers that are merged."""
    memory_bytes: int
    """The largest memory; on a GPU, the GPU's."""
    disk_bytes: int
    """Of the result and of files beside it that are deleted afterwards."""
    tokens: int | None
    """Of calibration text; None without."""
    device: str


def estimate_needs(plan: Plan, options: CalibrationOptions) -> Needs:
    """Estimate the memory and the disk space of a conversion. Calibration text is not read.

    Args:
        plan: of the conversion.
        options: of its calibration.
    """
    if not plan.merge_method.merges_layers:
        return _needs(plan, _NUMPY_BASE + (32 << 20), plan.disk_bytes)
    changed = {change.name for change in plan.changes}
    stored = sum(tensor.nbytes for tensor in plan.all_tensors() if tensor.name in changed)
    if options.source is None:
        rows = max(
            (layer.heads + layer.kv_heads) * (layer.key_head_dim + layer.value_head_dim) for layer in plan.layers
        )
        memory = _NUMPY_BASE + 6 * 8 * rows * hidden_size_of(plan)  # float64 copies of the layer's rows
        return _needs(plan, memory, plan.disk_bytes + stored)
    return _on_text(plan, options, stored)


def _needs(plan: Plan, memory: float, disk: float, tokens: int | None = None, device: str = "cpu") -> Needs:
    return Needs(
        work=plan.effective_method + (f" on {tokens:,} tokens" if tokens else ""),
        layers=len(plan.merged_layers),
        memory_bytes=int(memory),
        disk_bytes=int(disk),
        tokens=tokens,
        device=device,
    )


def _on_text(plan: Plan, options: CalibrationOptions, stored: int) -> Needs:
    """Of a method that runs source and student on text."""
    from gqa_convert.text.calibration import calibration_length_for, calibration_tokens_for

    config = plan.checkpoint.config
    tokens = options.tokens or calibration_tokens_for(config)
    block = min(options.sequence_length or calibration_length_for(config), tokens)
    device, place = _place(options.device)
    on_cpu = place.type == CPU.type
    first, layers, hidden_size = plan.layers[0], len(plan.layers), hidden_size_of(plan)
    outputs = first.heads * first.value_head_dim
    parameters = plan.parameters_before
    batch = min(tokens, max(BATCH_TOKENS, block))
    stage = trained_model(plan, block)
    rank = chosen_rank(stage, place, options.kl_rank, reserved=4 * parameters)
    last = options.kl_steps
    if last is None:
        trains = plan.merge_method.trains and steps_per_layer(options)
        possible = trains and has_room(parameters, stage, place, rank, reserved=4 * parameters)
        last = steps_together(options) if possible else 0
    recomputes = must_recompute(stage, place, rank, reserved=4 * parameters) is not False
    activations = KEPT_BYTES * tokens * hidden_size
    spilled = activations > (available_memory(CPU) or math.inf) / 4
    room = 0.7 * (available_memory(place) or math.inf)
    weights = 4 * parameters
    # the weights, or those of the layer that is running; and the pages of the file that is being loaded
    weights = weights + plan.checkpoint.weight_bytes if weights <= room else 2 * weights // layers
    # a layer's forward and backward pass, and its merge
    work = 4 * batch * (12 * outputs + 8 * hidden_size) + 8 * 6 * (hidden_size + outputs) * hidden_size
    work = max(work, stage.stage_bytes(rank, recomputes=recomputes) if last else 0)
    memory = (_BASE if on_cpu else 0) + weights + work + (0 if spilled else activations)
    disk = plan.disk_bytes + stored + (activations if spilled else 0)
    return _needs(plan, memory, disk, tokens, device)


@dataclass(frozen=True, slots=True)
class _Place:
    """What this module asks of a torch device."""

    type: str


CPU = _Place("cpu")


def _place(asked: str | None) -> tuple[str, Any]:
    """The device that a conversion runs on, by name and as torch has it; a CPU is found without torch."""
    if asked == CPU.type or (asked is None and not has_gpu_driver()):
        return CPU.type, CPU
    import torch

    device = chosen_device(asked)
    return device, torch.device(device)
