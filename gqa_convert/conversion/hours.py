"""How long the work on calibration text takes: operations that are counted, by the speed of the
device.

A matrix of n numbers takes 2 n operations at a token in a forward pass, and as many again for the
gradient of its inputs, and for that of itself where it is trained. Attention to a block of L tokens
takes 2 L operations for each number of a token's queries, and for each that its heads yield. All
else is left out: of layers of Llama-2-7B's shapes it took a fifth of the time
(docs/results/README.md).
"""

from gqa_convert.conversion.calibration.mixture import OWN_SHARE
from gqa_convert.conversion.options import (
    BATCH_TOKENS,
    CalibrationOptions,
    each_of,
    mixes,
    steps_per_layer,
    wanted_tokens,
)
from gqa_convert.conversion.plan import Plan
from gqa_convert.conversion.resources import (
    Decisions,
    block_tokens,
    device_of,
    is_reduced,
    torch_device,
)
from gqa_convert.data.sources import is_self
from gqa_convert.families.context_length import VOCABULARY_KEYS, stated_count
from gqa_convert.families.geometry import AttentionLayer
from gqa_convert.families.loading import hears
from gqa_convert.runtime.speed import GPUS, known_gpu, measured_speed

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_HELD_OUT = 1 / 8
"""Of the tokens that layers are fitted on: what decides between candidates, and as much again on
which the result is measured.
"""
_TRIALS = 10 * 4096
"""Tokens that attention reads to choose a layer's low-frequency pairs, in some ten trials."""
_FACTORS = 60
"""Operations in float64 to factorise a layer's heads, as a multiple of hidden_size cubed: measured
at 512 and 1,024.
"""
_WRITING_SHARE = 0.3
"""Of the speed of other products, that of writing text, which has 32 rows."""
_GPU_SHARE = 0.15
"""Of a GPU's peak: gradient steps of a layer reached 5%, uptraining 22 to 27%
(docs/results/README.md).
"""
_WIDER = 1 / 16
"""Of the peak in bfloat16, that in float32 and float64 on GPUs for data centres."""


def calibration_hours(
    plan: Plan, options: CalibrationOptions, decisions: Decisions, processes: int = 1
) -> float | None:
    """Estimate the hours of writing the source's own text, fitting the layers, and the last stage.

    Args:
        plan: of the conversion.
        options: of its calibration, which has text.
        decisions: what is done.
        processes: that divide the work, each with such a device. The first one writes.

    Returns:
        None of a source that hears, whose encoder's work depends on the sounds.
    """
    if hears(plan.checkpoint.config):
        return None
    device = device_of(options)
    dtype = "bfloat16" if is_reduced(plan, torch_device(device)) else "float32"
    written = _written_tokens(plan, options, decisions) * _forward(plan, options)
    divided = _fitting(plan, options) + _last_stage(plan, options, decisions)
    products = written / _WRITING_SHARE + divided / processes
    factors = _FACTORS * len(plan.merged_layers) * plan.hidden_size**3
    seconds = products / _speed(device, dtype) + factors / _speed(device, "float64")
    return seconds / 3600


def _speed(device: str, dtype: str) -> float:
    """Operations per second: a share of the peak of a GPU that is known, or measured."""
    gpu = known_gpu(device)
    if gpu is None:
        return measured_speed(device, dtype)
    teraflops, _ = GPUS[gpu]
    return teraflops * 1e12 * _GPU_SHARE * (1 if dtype == "bfloat16" else _WIDER)


# Operations


def _forward(plan: Plan, options: CalibrationOptions) -> float:
    """Operations at a token of a forward pass of the source."""
    config = plan.checkpoint.config
    vocabulary = stated_count(config, VOCABULARY_KEYS) or 0
    chosen = stated_count(config, ("num_experts_per_tok",)) or 1
    active = chosen / (stated_count(config, _EXPERTS) or chosen)
    # the output layer, even where it is the embedding, which takes no product
    numbers = float(vocabulary * plan.hidden_size)
    for name, entry in plan.checkpoint.entries.items():
        is_matrix = len(entry.shape) > 1 and vocabulary not in entry.shape
        if is_matrix and plan.family.owns(name):
            numbers += entry.elements * (active if ".experts." in name else 1)
    scores = sum(_scores(layer, block_tokens(plan, options)) for layer in plan.layers)
    return 2 * numbers + scores


def _attention(plan: Plan, options: CalibrationOptions, *, merged: bool) -> float:
    """The same of the attention of all layers that are merged, before or after that."""
    total, block = 0.0, block_tokens(plan, options)
    for layer, groups in plan.merged_layers:
        numbers = plan.attention_numbers(layer, groups if merged else layer.kv_heads)
        total += 2 * numbers + _scores(layer, block)
    return total


def _scores(layer: AttentionLayer, block: int) -> int:
    return 2 * block * layer.heads * (layer.key_head_dim + layer.value_head_dim)


def _fitting(plan: Plan, options: CalibrationOptions) -> float:
    """Of fitting one layer after the other."""
    tokens = wanted_tokens(plan, options)
    source = _attention(plan, options, merged=False)
    student = _attention(plan, options, merged=True)
    square = len(plan.merged_layers) * plan.hidden_size**2
    # source and student pass all layers, and measure the inputs of attention
    total = 2 * tokens * _forward(plan, options)
    total += tokens * (source + 2 * square) + _TRIALS * source
    if plan.merge_method.trains:
        # two regressions of what is missed, errors on what is held out, and steps
        total += 2 * tokens * (student + 4 * square) + 7 * _HELD_OUT * tokens * student
        total += 3 * steps_per_layer(options) * BATCH_TOKENS * student
    return total


def _last_stage(plan: Plan, options: CalibrationOptions, decisions: Decisions) -> float:
    """Of training all layers together, and of measuring the result on text that is held out."""
    steps = decisions.last_stage_steps(plan, options)
    forward = _forward(plan, options)
    # source and student, before and after it
    measured = _HELD_OUT * wanted_tokens(plan, options) * 2 * forward
    if not steps:
        return measured
    # source, student, and gradients of all inputs and of attention
    passes = 4 if decisions.recompute else 3
    step = passes * forward + _attention(plan, options, merged=True)
    return 4 * measured + steps * BATCH_TOKENS * step


def _written_tokens(plan: Plan, options: CalibrationOptions, decisions: Decisions) -> float:
    """How many tokens the source writes."""
    texts = each_of(options.source)
    own = sum(map(is_self, texts)) / max(1, len(texts))
    used = (1 + _HELD_OUT) * wanted_tokens(plan, options)
    if own:
        return own * used
    if decisions.no_own_text or not mixes(plan, options):
        return 0
    return OWN_SHARE * (used + BATCH_TOKENS * decisions.last_stage_steps(plan, options))
