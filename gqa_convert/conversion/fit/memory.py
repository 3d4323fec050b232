"""How much memory and disk a conversion takes: sums over the sizes in headers and config, without importing torch."""

from dataclasses import dataclass
from types import SimpleNamespace

from gqa_convert.checkpoint.devices import available_memory, chosen_device, has_gpu_driver
from gqa_convert.checkpoint.results import Result
from gqa_convert.conversion.fit.options import BATCH_TOKENS, CalibrationOptions, steps_together, wanted_tokens
from gqa_convert.conversion.plan import Plan
from gqa_convert.families.config_sizes import HIDDEN_SIZE_KEYS, VOCABULARY_KEYS
from gqa_convert.families.context_length import stated_count

_KEPT_BYTES = 4 * 6
"""What waits between layers per token and unit of hidden_size: the residual stream and attention's input, of source and
student, and two targets, in float32.
"""
_NUMPY_BASE = 92 << 20
"""Bytes of a process that has imported numpy, and of buffers."""
_TORCH_BASE = 450 << 20
"""Bytes of a process that has imported torch and transformers."""
WEIGHTS_SHARE = 0.7
"""Of the free memory that the weights of the source may take; the rest is for activations."""
_UNKNOWN = 1 << 62
_STAGE_SHARE = 0.7
"""Of the free memory that the last stage may take."""
_ACTIVATIONS = 40
"""Roughly how many numbers a layer keeps for the backward pass, per token and unit of hidden_size."""
_MOST_PARAMETERS = 200_000_000
"""Of a model that is trained as a whole on a CPU, which would need hours for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs(Result):
    """What a conversion is estimated to need on this machine.

    Attributes:
        work: the method, and the number of tokens where it uses text.
        layers: layers that are merged.
        memory_bytes: the largest memory; on a GPU, the GPU's.
        disk_bytes: of the result and of files beside it that are deleted afterwards.
        rewritten_bytes: of those, what the source takes in another form; 0 where it is converted as it is, or rewritten
            while it is read.
        tokens: of calibration text; None without.
    """

    work: str
    layers: int
    memory_bytes: int
    disk_bytes: int
    rewritten_bytes: int
    tokens: int | None
    device: str


def estimate_needs(plan: Plan, options: CalibrationOptions) -> Needs:
    """Estimate the memory and the disk space of a conversion. Calibration data is not read.

    Args:
        plan: of the conversion.
        options: of its calibration.
    """
    tokens, device, work, rewritten = None, "cpu", plan.merge_method.name, 0
    memory: float = _NUMPY_BASE
    disk = plan.disk_bytes
    if plan.merge_method.merges_layers:
        # merged layers lie beside the result until it is written
        disk += sum(tensor.entry.nbytes for tensor in plan.regrouped.values())
        widths = [(layer.heads + layer.kv_heads) * (layer.key_head_dim + layer.value_head_dim) for layer in plan.layers]
        memory += 6 * 8 * max(widths) * hidden_size_of(plan)  # float64 copies of a layer's rows
        if options.has_data:
            from gqa_convert.conversion.fit.calibration_text import calibration_length_for

            if plan.checkpoint.recipes:
                rewritten = sum(entry.nbytes for *_, entry in plan.checkpoint.tensors())
            tokens = wanted_tokens(plan, options)
            work += f" on {tokens:,} tokens"
            if options.device is not None or has_gpu_driver():
                device = chosen_device(options.device)
            block = min(tokens, options.sequence_length or calibration_length_for(plan.checkpoint.config))
            memory = _running_bytes(plan, options, tokens, block, device)
    return Needs(
        work=work,
        layers=len(plan.merged_layers),
        memory_bytes=int(memory),
        disk_bytes=disk + rewritten,
        rewritten_bytes=rewritten,
        tokens=tokens,
        device=device,
    )


def _running_bytes(plan: Plan, options: CalibrationOptions, tokens: int, block: int, device: str) -> float:
    """What it takes on a device to run source and student on some tokens, in blocks, and to fit them."""
    hidden_size, layer = hidden_size_of(plan), plan.layers[0]
    outputs = layer.heads * layer.value_head_dim
    forward = 4 * min(tokens, max(BATCH_TOKENS, block)) * (12 * outputs + 8 * hidden_size)
    work = forward + 6 * 8 * (hidden_size + outputs) * hidden_size
    weights = 4 * plan.parameters_before
    is_possible = options.kl_steps is not None or trains_together(plan, block, device, weights)
    if plan.merge_method.trains and steps_together(options) and is_possible:
        work = max(work, last_stage_bytes(plan, block))
    base = _TORCH_BASE if device == "cpu" else 0
    in_memory = min(weights + plan.checkpoint.weight_bytes, WEIGHTS_SHARE * free_memory(device))
    return base + in_memory + work + _KEPT_BYTES * tokens * hidden_size


def free_memory(device: str) -> int:
    """The bytes that are free on a device; more than there ever are where the system does not say."""
    if device == "cpu":
        return available_memory(SimpleNamespace(type=device)) or _UNKNOWN
    import torch

    return available_memory(torch.device(device)) or _UNKNOWN


def trains_together(plan: Plan, tokens: int, device: str, weights: int = 0) -> bool:
    """Whether there is memory for the stage that trains all layers together and, on a CPU, time.

    Args:
        plan: of the conversion.
        tokens: of the longest sequence.
        device: such as `cpu` or `cuda:1`.
        weights: bytes of the source's weights, where they are not on the device yet.
    """
    is_quick = device != "cpu" or plan.parameters_before <= _MOST_PARAMETERS
    return is_quick and last_stage_bytes(plan, tokens) < _STAGE_SHARE * (free_memory(device) - weights)


def last_stage_bytes(plan: Plan, tokens: int) -> int:
    """What that stage takes beside the weights of the source, in float32: the numbers that it trains beside those that they
    began with, their gradients and two moments, the weights of modules that they are put into, and what a sequence keeps
    for its backward pass, logits of student and source included.
    """
    hidden_size, rows = hidden_size_of(plan), 0
    for layer, groups in plan.merged_layers:
        trained, installed = layer.heads + groups, layer.heads + layer.kv_heads
        rows += (layer.key_head_dim + layer.value_head_dim) * (5 * trained + installed)
    logits = 3 * (stated_count(plan.checkpoint.config, VOCABULARY_KEYS) or 0)
    return 4 * (rows * hidden_size + tokens * (_ACTIVATIONS * len(plan.layers) * hidden_size + logits))


def hidden_size_of(plan: Plan) -> int:
    """As its config has it, else the width of the first layer's queries."""
    layer = plan.layers[0]
    return stated_count(plan.checkpoint.config, HIDDEN_SIZE_KEYS) or layer.heads * layer.key_head_dim
