"""What a conversion is estimated to need: memory, disk space and time."""

from dataclasses import dataclass, replace

from gqa_convert.processes import started
from gqa_convert.runtime.json_objects import Result

from .hours import calibration_hours
from .options import CalibrationOptions, mixes, steps_together, wanted_tokens
from .plan import Plan
from .resources import (
    decide,
    device_of,
    held_bytes,
    holds_halves,
    is_reduced,
    is_slow,
    last_stage_free,
    running_bytes,
    sharded_free,
    torch_device,
    writing_bytes,
)

_NUMPY_BASE = 92 << 20
"""Bytes of a process that has imported numpy, and of buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs(Result):
    """What a conversion is estimated to need on this machine.

    Attributes:
        work: the method, the number of tokens where it uses text, and the steps of the last stage
            where it runs.
        memory_bytes: with so much free, nothing is left out and nothing waits for the disk; on a
            GPU, the GPU's.
        least_memory_bytes: with which the weights lie on the disk, and what needs them all in
            memory is left out.
        offloaded_bytes: what they take then, at most, in the folder for temporary files.
        disk_bytes: of the result and of files beside it that are deleted afterwards.
        tokens: of calibration text; None without.
        device: where the source runs.
        hours: of the work on text, with the memory that is free now; None where there is none.
        left_out: what is left out with the memory that is free now, and why.
    """

    work: str
    memory_bytes: int
    least_memory_bytes: int
    offloaded_bytes: int = 0
    disk_bytes: int
    tokens: int | None = None
    device: str = "cpu"
    hours: float | None = None
    left_out: tuple[str, ...] = ()


def estimate_needs(plan: Plan, options: CalibrationOptions, processes: int | None = None) -> Needs:
    """Estimate the memory, the disk space and the hours of a conversion. Calibration data is not
    read.

    Args:
        plan: of the conversion.
        options: of its calibration.
        processes: that would divide the work; by default those of this run.
    """
    needs = Needs(
        work=plan.merge_method.name,
        memory_bytes=_NUMPY_BASE,
        least_memory_bytes=_NUMPY_BASE,
        disk_bytes=plan.disk_bytes,
    )
    if not plan.merge_method.merges_layers:
        return needs
    # float64 copies of a layer's rows; merged layers lie beside the result until it is written
    largest = max(plan.attention_numbers(layer, layer.kv_heads) for layer in plan.layers)
    memory = _NUMPY_BASE + 6 * 8 * largest
    merged = sum(tensor.entry.nbytes for tensor in plan.regrouped.values())
    needs = replace(
        needs, memory_bytes=memory, least_memory_bytes=memory, disk_bytes=plan.disk_bytes + merged
    )
    if not options.has_data:
        return needs
    return _with_text(plan, options, needs, processes or started())


def _with_text(plan: Plan, options: CalibrationOptions, needs: Needs, processes: int) -> Needs:
    """What a conversion needs that runs the source on text."""
    tokens, device = wanted_tokens(plan, options), device_of(options)
    running = running_bytes(plan, options, device)
    entries = plan.checkpoint.entries.values()
    # the whole source; or a layer together where all others lie on the disk, or a large tensor
    memory = running + held_bytes(plan.checkpoint, halves=holds_halves(plan, device))
    sizes = [entry.elements for entry in entries]
    least, offloaded = running + 4 * max(*sizes, sum(sizes) // len(plan.layers)), 4 * sum(sizes)
    in_16_bits = ", in bfloat16" if is_reduced(plan, torch_device(device)) else ""
    work = f"{needs.work} on {tokens:,} tokens{in_16_bits}"
    writing = writing_bytes(plan, device) if mixes(plan, options) else 0
    memory = max(memory, writing)
    steps, is_asked = steps_together(plan, options), options.kl_steps is not None
    if steps and (is_asked or not is_slow(plan, device)):
        alone = last_stage_free(plan, options, recompute=True)
        shared = sharded_free(plan, options, processes)
        memory = max(writing, running + min(alone, shared or alone))
        work += f", then up to {steps:,} steps on all layers together"
        if is_asked:
            least, offloaded = memory, 0
    rewritten = sum(entry.nbytes for entry in entries) if plan.checkpoint.recipes else 0
    decisions = decide(plan, options, processes)
    return replace(
        needs,
        work=work,
        memory_bytes=memory,
        least_memory_bytes=least,
        offloaded_bytes=offloaded,
        disk_bytes=needs.disk_bytes + rewritten,
        tokens=tokens,
        device=device,
        hours=calibration_hours(plan, options, decisions, processes),
        left_out=decisions.left_out(plan, options),
    )
