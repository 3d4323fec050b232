"""What a conversion needs of the machine, from the sizes in headers and config; and what the memory
that is free decides when it begins.
"""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from gqa_convert.checkpoint.headers import ITEM_BYTES
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.families.context_length import VOCABULARY_KEYS, stated_count
from gqa_convert.families.loading import is_encoder_decoder
from gqa_convert.processes import on_this_machine, started
from gqa_convert.runtime.machine import (
    available_memory,
    chosen_device,
    has_gpu_driver,
    multiplies_bfloat16,
)
from gqa_convert.runtime.messages import size

from .options import BATCH_TOKENS, CalibrationOptions, mixes, steps_together, wanted_tokens
from .plan import Plan

WEIGHTS_SHARE = 0.7
"""Of the free memory that the weights of the source may take; the rest is for activations."""
LAST_STAGE = "the last stage, which trains all layers together"
_KEPT_BYTES = 4 * 6
"""What waits between layers per token and unit of hidden_size: the residual stream and attention's
input, of source and student, and two targets, in float32.
"""
_KEPT_SHARE = 0.1
"""Of a GPU's free memory, what waits between layers may take there."""
_TORCH_BASE = 450 << 20
"""Bytes of a process that has imported torch and transformers."""
_UNKNOWN = 1 << 62
_STAGE_SHARE = 0.95
"""Of the memory that is free beside the weights, what the last stage may take by its estimate."""
_ACTIVATIONS = 18
"""How many numbers a layer keeps for the backward pass, per token and unit of hidden_size, counted
as float32.
"""
_STAGE_BASE = 600 << 20
"""Bytes of the last stage for what its products and its comparisons work with. This and the number
above were measured: `benchmarks/last_stage_memory.py`.
"""
_WIDE = 256
"""The hidden_size from which on products take longer in float32 than the conversions between types.
"""
_MOST_PARAMETERS = 200_000_000
"""Of a model that is trained as a whole on a CPU, which would need hours for more."""


# What the free memory decides


@dataclass(frozen=True, slots=True)
class Decisions:
    """What the device and its free memory decide when a conversion begins. A run that resumes obeys
    it, on another machine too.

    Attributes:
        in_bfloat16: see `is_reduced`.
        no_own_text: why the source writes no text that is mixed in; empty where it does.
        no_last_stage: why all layers are not trained together unasked; empty where they are.
        recompute: whether activations inside layers are computed again in that stage's backward
            passes, since they need too much memory to be kept. It takes a third more time and
            changes no gradient.
        sharded: whether that stage needs the memory of several processes, each of which then holds
            a share of the weights and of what is trained.
        on_host: whether what waits between layers lies in the machine's memory, since it would take
            too much of the GPU's. It changes no number.
    """

    in_bfloat16: bool = False
    no_own_text: str = ""
    no_last_stage: str = ""
    recompute: bool = False
    sharded: bool = False
    on_host: bool = False

    def left_out(self, plan: Plan, options: CalibrationOptions) -> tuple[str, ...]:
        """What is left out, and why, for users."""
        found = []
        if self.no_own_text and mixes(plan, options):
            found.append(
                f"text of the source's own among the calibration text, because {self.no_own_text}"
            )
        if steps_together(plan, options) and not self.last_stage_steps(plan, options):
            found.append(f"{LAST_STAGE}, because {self.no_last_stage}")
        return tuple(found)

    def last_stage_steps(self, plan: Plan, options: CalibrationOptions) -> int:
        """How many steps train all layers together."""
        is_left_out = self.no_last_stage and options.kl_steps is None
        return 0 if is_left_out else steps_together(plan, options)


def decide(plan: Plan, options: CalibrationOptions, processes: int | None = None) -> Decisions:
    """Decide, by the device and the memory that is free now, how the source is run, and what is
    done beside fitting layer by layer.

    Args:
        plan: of the conversion.
        options: of its calibration.
        processes: that would divide the work; by default those of this run.
    """
    processes = processes or started()
    device = device_of(options)
    in_bfloat16 = is_reduced(plan, torch_device(device))
    if not plan.merge_method.trains:
        return Decisions(in_bfloat16)
    free = free_memory(device)
    lacking = f"of free memory, and {device} has {size(free)}"
    # text of the source's own
    no_own_text = no_last_stage = ""
    needed = writing_bytes(plan, device)
    if needed > free:
        no_own_text = f"it needs {size(needed)} {lacking}"
    # the last stage, on one device or divided among several
    needed = last_stage_free(plan, options, recompute=True)
    shared = sharded_free(plan, options, processes)
    sharded = needed > free and shared is not None and shared <= free
    if is_slow(plan, device):
        no_last_stage = (
            f"it takes hours on a CPU above {_MOST_PARAMETERS:,} parameters "
            f"(--kl-steps {steps_together(plan, options)} runs it)"
        )
    elif needed > free and not sharded:
        no_last_stage = f"it needs {size(needed)} {lacking}"
        if shared is not None:
            no_last_stage += f"; each of {processes} processes would need {size(shared)}"
    recompute = last_stage_free(plan, options, recompute=False) > free
    # what waits between layers
    kept = _KEPT_BYTES * wanted_tokens(plan, options) * plan.hidden_size // processes
    on_host = device != "cpu" and kept > _KEPT_SHARE * free
    return Decisions(in_bfloat16, no_own_text, no_last_stage, recompute, sharded, on_host)


def is_slow(plan: Plan, device: str) -> bool:
    """Whether training all layers together takes more time than anyone wants to wait unasked."""
    return device == "cpu" and plan.parameters_before > _MOST_PARAMETERS


def device_of(options: CalibrationOptions) -> str:
    """Where models run, found without importing torch on a machine without a GPU."""
    is_cpu = options.device is None and not has_gpu_driver()
    return "cpu" if is_cpu else chosen_device(options.device)


def free_memory(device: str) -> int:
    """The bytes that are free on a device; more than there ever are where the system does not
    say.
    """
    if device == "cpu":
        return available_memory(SimpleNamespace(type=device)) or _UNKNOWN
    import torch

    return available_memory(torch.device(device)) or _UNKNOWN


# How the loaded source holds its numbers


def is_reduced(plan: Plan, device: Any) -> bool:
    """Whether products with activations are made in bfloat16: where it is faster on a torch device,
    the merged layers of the source have 16 bits, and their products are large enough to gain by it.
    """
    stored = plan.checkpoint
    dtypes = {
        stored.result_dtypes.get(change.name, stored.entries[change.name].dtype)
        for change in plan.changes
        if change.name in stored.entries
    }
    is_wide = plan.hidden_size >= _WIDE
    return dtypes <= {"F16", "BF16"} and is_wide and multiplies_bfloat16(device)


def holds_halves(plan: Plan, device: str) -> bool:
    """Whether the loaded source holds its matrices in the 16 bits of its files, of which autocast
    products are the same.
    """
    return half_type(plan.checkpoint) is not None and is_reduced(plan, torch_device(device))


def half_type(checkpoint: Checkpoint) -> str | None:
    """The one type of 16 bits that all tensors of a decoder have; None for other models, for those
    of several types, and for experts, which transformers joins into tensors that no linear layer
    holds.
    """
    dtypes = {entry.dtype for entry in checkpoint.entries.values() if entry.dtype in ITEM_BYTES}
    has_experts = any(".experts." in name for name in checkpoint.entries)
    if is_encoder_decoder(checkpoint.config) or has_experts or len(dtypes) != 1:
        return None
    (dtype,) = dtypes
    return dtype if ITEM_BYTES[dtype] == 2 else None


def held_bytes(checkpoint: Checkpoint, *, halves: bool) -> int:
    """What a loaded model's weights take: 4 bytes a number, or with `halves` 2 in all matrices but
    the embeddings.
    """
    vocabulary = stated_count(checkpoint.config, VOCABULARY_KEYS)
    total, has_embeddings = 0, False
    for entry in checkpoint.entries.values():
        is_embedding = vocabulary in entry.shape and not has_embeddings
        has_embeddings = has_embeddings or is_embedding
        is_half = halves and len(entry.shape) == 2 and not is_embedding
        total += entry.elements * (2 if is_half else 4)
    return total


def torch_device(name: str) -> Any:
    """What has the type of a torch device, without torch."""
    return SimpleNamespace(type=name.partition(":")[0])


# Bytes


def writing_bytes(plan: Plan, device: str) -> int:
    """Where so much is free, the source writes text: for its weights, and as much again."""
    itemsize = 2 if multiplies_bfloat16(torch_device(device)) else 4
    return 2 * itemsize * plan.parameters_before


def running_bytes(plan: Plan, options: CalibrationOptions, device: str) -> int:
    """What it takes on a device, beside the weights, to run source and student on text, in blocks,
    and to fit one layer after the other.
    """
    tokens, block = wanted_tokens(plan, options), block_tokens(plan, options)
    hidden_size, layer = plan.hidden_size, plan.layers[0]
    outputs = layer.heads * layer.value_head_dim
    together = min(tokens, max(BATCH_TOKENS, block))
    forward = 4 * together * (12 * outputs + 8 * hidden_size)
    work = forward + 6 * 8 * (hidden_size + outputs) * hidden_size
    base = _TORCH_BASE if device == "cpu" else 0
    return base + work + _KEPT_BYTES * tokens * hidden_size


def last_stage_free(plan: Plan, options: CalibrationOptions, *, recompute: bool) -> int:
    """Where so much is free, the weights are not offloaded, and all layers are trained together
    beside them.
    """
    device = device_of(options)
    weights = held_bytes(plan.checkpoint, halves=holds_halves(plan, device))
    beside = last_stage_bytes(plan, block_tokens(plan, options), device, recompute=recompute)
    return math.ceil(max(weights / WEIGHTS_SHARE, weights + beside / _STAGE_SHARE))


def sharded_free(plan: Plan, options: CalibrationOptions, processes: int) -> int | None:
    """Where so much is free on the device of each of several processes, they train all layers
    together with a share of the weights and of what is trained in each. Processes on CPUs share the
    memory of their machine. None for a single process, and for encoder-decoders, whose layers need
    more than hidden states.
    """
    if processes == 1 or is_encoder_decoder(plan.checkpoint.config):
        return None
    device = device_of(options)
    weights = held_bytes(plan.checkpoint, halves=holds_halves(plan, device))
    # what lies outside the layers is needed whole, of the layers one and the next
    vocabulary = stated_count(plan.checkpoint.config, VOCABULARY_KEYS)
    entries = plan.checkpoint.entries.values()
    outside = 4 * sum(entry.elements for entry in entries if vocabulary in entry.shape)
    layers = 2 * max(0, weights - outside) // len(plan.layers)
    # of one layer what is trained, its gradients, and the buffer in which these are summed
    trained = _trained_numbers(plan)
    gathered = 3 * 4 * trained // len(plan.merged_layers)
    alone = last_stage_bytes(plan, block_tokens(plan, options), device, recompute=True)
    beside = alone - 16 * trained * (processes - 1) // processes + gathered
    held = weights // processes + outside + layers
    needed = max(held / WEIGHTS_SHARE, held + beside / _STAGE_SHARE)
    return math.ceil(needed * (on_this_machine() if device == "cpu" else 1))


def last_stage_bytes(plan: Plan, tokens: int, device: str, *, recompute: bool) -> int:
    """What that stage takes beside the weights of the source: the numbers that it trains, their
    gradients and two moments in float32, and in bfloat16 where products are made in it and nothing
    is computed again; and what a sequence keeps for its backward pass, logits of student and source
    included.
    """
    # a fused projection runs with the rows of its shared heads repeated
    fused = [change for change in plan.changes if len(change.sections) > 1]
    repeated = 4 * sum(math.prod(change.before) for change in fused)
    copied = not recompute and is_reduced(plan, torch_device(device))
    trained = _trained_numbers(plan) * (4 * 4 + (2 if copied else 0))
    kept = _ACTIVATIONS + len(plan.layers) if recompute else _ACTIVATIONS * len(plan.layers)
    logits = 3 * (stated_count(plan.checkpoint.config, VOCABULARY_KEYS) or 0)
    activations = 4 * tokens * (kept * plan.hidden_size + logits)
    return _STAGE_BASE + trained + repeated + activations


def _trained_numbers(plan: Plan) -> int:
    """How many numbers the projections of all merged layers have."""
    return sum(plan.attention_numbers(layer, kv_heads) for layer, kv_heads in plan.merged_layers)


def block_tokens(plan: Plan, options: CalibrationOptions) -> int:
    """The tokens of the longest block of calibration text, at most."""
    from .calibration.streams import calibration_length_for

    length = options.sequence_length or calibration_length_for(plan.checkpoint.config)
    return min(wanted_tokens(plan, options), length)
