"""Estimates the time, the memory and the disk space of a conversion, from the sizes in headers and config and from the
speed of this machine.

Letters in formulae: T tokens of calibration text, B tokens of a batch, d hidden_size, q query heads * head_dim.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gqa_convert.checkpoint.devices import chosen_devices, has_gpu_driver
from gqa_convert.checkpoint.machine import available_memory
from gqa_convert.checkpoint.results import Result
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.conversion.fit.calibrated import (
    BATCH_TOKENS,
    HELD_OUT,
    KEPT_BYTES,
    LOW_FREQUENCY_TOKENS,
    CalibrationOptions,
    steps_per_layer,
    steps_together,
)
from gqa_convert.conversion.fit.limits import (
    FEWER,
    MOST_DOUBLE_COLUMNS,
    STRENGTHS,
    chosen_rank,
    has_room,
    hidden_size_of,
    may_be_reduced,
    must_recompute,
    trained_model,
)
from gqa_convert.conversion.fit.probe import has_fast_bfloat16, probed_rates
from gqa_convert.conversion.fit.rates import LayerSizes, Rates, double_rate, measured_rates
from gqa_convert.conversion.plan import Plan
from gqa_convert.families.config_sizes import VOCABULARY_KEYS
from gqa_convert.families.context_length import stated_count

_START = 3.0
"""Seconds to import torch and transformers."""
_TOKENISED = 1e6
"""Bytes of text per second that a tokenizer reads."""
_LEAST_TEXT, _TEXT_PER_TOKEN = 1 << 22, 64
"""Bytes of a large text that are tokenised: at least, and per token requested."""
_DISK = 3e8
"""Bytes per second that a disk reads or writes."""
_BASE = 450 << 20
"""Bytes of a process that has imported torch and transformers."""
_NUMPY_BASE = 60 << 20
_MERGE = 3
"""Operations of merging a layer's heads, in products of all query, key and value rows with a second moment."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_USED_EXPERTS = ("num_experts_per_tok", "num_selected_experts", "moe_topk")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostEstimate(Result):
    """The estimated cost of a conversion on this machine."""

    work: str
    """The method, and the number of tokens where it uses text."""
    seconds_by_stage: Mapping[str, float]
    """`start`, `layers`, `last_stage` and `writing`; stages that do not take place are 0."""
    layers: int
    """Layers that are merged."""
    memory_bytes: int
    """The largest memory of all processes; on GPUs, that of one GPU."""
    disk_bytes: int
    """Of the result and of files beside it that are deleted afterwards."""
    tokens: int | None
    """Of calibration text; None without."""
    device: str
    """One, or several with commas between."""

    @property
    def seconds(self) -> float:
        return sum(self.seconds_by_stage.values())

    def as_json(self) -> JsonObject:
        found = asdict(self) | {"seconds": round(self.seconds, 1)}
        return found | {"seconds_by_stage": {name: round(each, 1) for name, each in self.seconds_by_stage.items()}}


def estimate_cost(plan: Plan, options: CalibrationOptions, *, quick: bool = False) -> CostEstimate:
    """Estimate a conversion.

    Calibration text is not read: a text with fewer tokens than requested takes less time.

    Args:
        plan: of the conversion.
        options: of its calibration.
        quick: rate a CPU by one product of matrices, which takes a twentieth of a second and no torch. Otherwise, and
            where there may be a GPU, the products of a layer are timed for a second or two.
    """
    writing = plan.disk_bytes / _DISK
    if not plan.merge_method.merges_layers:
        return _estimate(plan, {"writing": 0.5 + writing}, _NUMPY_BASE + (32 << 20), plan.disk_bytes)
    stored = sum(tensor.nbytes for shard in plan.shards for tensor in shard.tensors if tensor.name in _changed(plan))
    if options.source is None:
        rows, inputs = _largest_layer(plan)
        # products of rows with one another and with the maps, and their errors
        seconds = len(plan.merged_layers) * 4 * _MERGE * rows**2 * inputs * double_rate()
        memory = _NUMPY_BASE + 6 * 8 * rows * inputs  # float64 copies of the layer's rows
        return _estimate(plan, {"layers": seconds, "writing": 0.5 + writing}, memory, plan.disk_bytes + stored)
    return _on_text(plan, options, writing, stored, quick=quick)


def _estimate(
    plan: Plan, seconds: Mapping[str, float], memory: float, disk: float, tokens: int | None = None, device: str = "cpu"
) -> CostEstimate:
    every = {name: seconds.get(name, 0.0) for name in ("start", "layers", "last_stage", "writing")}
    return CostEstimate(
        work=plan.effective_method + (f" on {tokens:,} tokens" if tokens else ""),
        seconds_by_stage=every,
        layers=len(plan.merged_layers),
        memory_bytes=int(memory),
        disk_bytes=int(disk),
        tokens=tokens,
        device=device,
    )


def _changed(plan: Plan) -> frozenset[str]:
    return frozenset(change.name for change in plan.changes)


def _largest_layer(plan: Plan) -> tuple[int, int]:
    """The rows of queries, keys, values and outputs of the largest layer, and their inputs."""
    rows = max((layer.heads + layer.kv_heads) * (layer.key_head_dim + layer.value_head_dim) for layer in plan.layers)
    return rows, hidden_size_of(plan)


def _on_text(plan: Plan, options: CalibrationOptions, writing: float, stored: float, *, quick: bool) -> CostEstimate:
    """Of a method that runs source and student on text."""
    from gqa_convert.text.calibration import calibration_length_for, calibration_tokens_for

    config = plan.checkpoint.config
    tokens = options.tokens or calibration_tokens_for(config)
    block = min(options.sequence_length or calibration_length_for(config), tokens)
    quickly = quick and _runs_on_a_cpu(options.device)
    devices = (CPU.type,) if options.device is None and quickly else chosen_devices(options.device)
    sizes, rates, place = (_probed if quickly else _measured)(plan, block, devices[0])
    device = str(place)
    # devices divide the sequences of the text, and those of a batch; the first one solves for all
    shares = min(len(devices), -(-tokens // block))
    shares_of_step = min(shares, max(1, BATCH_TOKENS // block))
    layers, d, q = len(plan.layers), sizes.hidden_size, sizes.heads * sizes.value_head_dim
    steps = steps_per_layer(options) if plan.merge_method.trains else 0
    precise = rates.double if max(d, q) <= MOST_DOUBLE_COLUMNS else rates.single
    # source and student up to the layer, and the source's attention of the inputs of both, the targets
    divided = tokens * (4 * rates.attention + 2 * rates.feed_forward)
    # the second moment of the inputs, and one merge
    divided += 2 * tokens * d**2 * precise
    seconds = _merge_seconds(plan, rates.double, trials=1)
    low = _low_frequency_trials(plan)
    # every trial merges the keys and runs the layer
    divided += (low + 1) * min(tokens, LOW_FREQUENCY_TOKENS) * rates.attention if low else 0
    seconds += _merge_seconds(plan, rates.double, trials=low) / _MERGE
    # for `fit` a regression before the gradient steps and one at the end; errors are those of a few batches
    regressions = 0 if not plan.merge_method.trains else 2 if steps else 1
    regression = tokens * rates.attention + 2 * tokens * q * (q + d) * precise
    divided += regressions * regression + tokens * rates.attention
    seconds += regressions * len(STRENGTHS) * q**3 * rates.double + divided / shares
    seconds += steps * min(sizes.batch, tokens) * rates.attention_gradient / shares_of_step
    parameters = plan.parameters_before
    batch = min(tokens, max(BATCH_TOKENS, block))
    stage = trained_model(plan, block)
    rank = chosen_rank(stage, place, options.kl_rank, reserved=4 * parameters)
    last = options.kl_steps
    if last is None:
        held_out = plan.merge_method.trains and steps
        possible = held_out and has_room(parameters, stage, place, rank, reserved=4 * parameters)
        last = steps_together(options) if possible else 0
    forward = layers * (rates.attention + rates.feed_forward) + rates.logits
    # teacher and student, and the student's way back through everything
    step = batch * (forward + layers * (rates.attention_gradient + rates.feed_forward_gradient) + rates.logits_gradient)
    recomputes = must_recompute(stage, place, rank, reserved=4 * parameters) is not False
    step += batch * layers * (rates.attention + rates.feed_forward) if recomputes else 0
    judged = 2 * max(BATCH_TOKENS, tokens // HELD_OUT) * (2 * forward + rates.logits_gradient - rates.logits)
    together = last * step / shares_of_step + judged / shares if last else 0.0
    start = _START + max(_LEAST_TEXT, _TEXT_PER_TOKEN * tokens) / _TOKENISED + plan.checkpoint.weight_bytes / _DISK
    activations = KEPT_BYTES * tokens * d
    free = available_memory(CPU) or math.inf
    spilled = activations > free / 4
    weights = 4 * parameters
    copies = shares if device == CPU.type else 1  # in one memory
    room = 0.7 * (available_memory(place) or math.inf) / copies
    # the weights, or those of the layer that is running; and the pages of the file that is being loaded
    weights = weights + plan.checkpoint.weight_bytes if weights <= room else 2 * weights // layers
    work = 4 * batch * (12 * q + 8 * d) + 8 * 6 * (d + q) * d  # a layer's forward and backward pass, and its merge
    work = max(work, stage.stage_bytes(rank, recomputes=recomputes) if last else 0)
    kept = 0 if spilled else activations * copies / shares
    memory = copies * ((_BASE if device == CPU.type else 0) + weights + work) + kept
    disk = plan.disk_bytes + stored + (activations if spilled else 0)
    spent = {"start": start, "layers": layers * seconds, "last_stage": together, "writing": writing}
    return _estimate(plan, spent, memory, disk, tokens, ",".join(devices[:shares]))


@dataclass(frozen=True, slots=True)
class _Place:
    """What this module asks of a torch device."""

    type: str

    def __str__(self) -> str:
        return self.type


CPU = _Place("cpu")


def _runs_on_a_cpu(asked: str | None) -> bool:
    """Whether a conversion surely runs on the CPU, found without torch."""
    return not has_gpu_driver() if asked is None else {*asked.split(",")} == {CPU.type}


def _probed(plan: Plan, block: int, device: str) -> tuple[LayerSizes, Rates, _Place]:
    """The sizes of a layer and the rates of the CPU, by a product of matrices in numpy."""
    del device
    reduced = may_be_reduced(plan) and has_fast_bfloat16()
    sizes = _sizes(plan, block, repeats_products=reduced)
    return sizes, probed_rates(sizes, reduced=reduced), CPU


def _measured(plan: Plan, block: int, device: str) -> tuple[LayerSizes, Rates, Any]:
    """The sizes of a layer and the rates of a device, a torch device, by the products of the layer."""
    import torch

    from gqa_convert.conversion.fit.precision import is_reduced, precision_of

    place = torch.device(device)
    precision = precision_of(plan, place)
    sizes = _sizes(plan, block, repeats_products=is_reduced(precision))
    return sizes, measured_rates(sizes, str(place), precision), place


def _sizes(plan: Plan, block: int, *, repeats_products: bool) -> LayerSizes:
    """The sizes of the mean layer.

    Args:
        plan: of the conversion.
        block: tokens of a block.
        repeats_products: as an `Assembly` does.
    """
    config, first, layers = plan.checkpoint.config, plan.layers[0], plan.layers
    d, vocabulary = hidden_size_of(plan), stated_count(config, VOCABULARY_KEYS) or 0
    entries = [entry for _, _, entry in plan.checkpoint.tensors()]
    embeddings = sum(entry.elements for entry in entries if vocabulary in entry.shape)
    attention = sum(d * (each.heads + each.kv_heads) * (each.key_head_dim + each.value_head_dim) for each in layers)
    other = max(0, plan.parameters_before - embeddings - attention)
    merged = sum(plan.layer_groups) / len(plan.layer_groups)
    trained = max(1, round(merged)) if repeats_products and merged <= FEWER * first.kv_heads else first.kv_heads
    experts, used = stated_count(config, _EXPERTS), stated_count(config, _USED_EXPERTS)
    if experts and used:
        other = other * min(used, experts) // experts
    return LayerSizes(
        hidden_size=d,
        heads=first.heads,
        kv_heads=first.kv_heads,
        trained_kv_heads=trained,
        key_head_dim=first.key_head_dim,
        value_head_dim=first.value_head_dim,
        feed_forward=other // len(layers),
        vocabulary=vocabulary,
        block=block,
        batch=max(BATCH_TOKENS, block),
    )


def _merge_seconds(plan: Plan, rate: float, trials: int) -> float:
    """Of merging one layer's heads this many times."""
    rows, inputs = _largest_layer(plan)
    return trials * _MERGE * 2 * rows * inputs**2 * rate


def _low_frequency_trials(plan: Plan) -> int:
    """About how many choices of low-frequency pairs are tried: a Fibonacci search, and a few neighbours at its end."""
    pairs = plan.layers[0].key_head_dim // 2
    return round(math.log(max(2, pairs), 1.618)) + 3
