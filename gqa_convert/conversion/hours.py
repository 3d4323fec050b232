"""How long the work on calibration text takes: operations that are counted, by the speed of the
device.

A matrix of n numbers takes 2 n operations at a token in a forward pass, and as many again for the
gradient of its inputs, and for that of itself where it is trained. All else is left out: of layers
of Llama-2-7B's shapes it took a fifth of the time (docs/results/README.md).
"""

from gqa_convert.families.context_length import VOCABULARY_KEYS, stated_count
from gqa_convert.families.loading import hears
from gqa_convert.runtime.speed import device_speed

from .calibration.mixture import OWN_SHARE
from .options import BATCH_TOKENS, CalibrationOptions, mixes, steps_per_layer, wanted_tokens
from .plan import Plan
from .resources import Decisions, device_of, is_reduced, torch_device

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_FACTORS = 60
"""Operations in float64 to factorise a layer's heads, as a multiple of hidden_size cubed: measured
at 512 and 1,024.
"""
_WRITING_SHARE = 0.3
"""Of the speed of other products, that of writing text, which has 32 rows."""
_WIDER = 1 / 16
"""Of a GPU's speed in bfloat16, that in float32 and float64."""


def calibration_hours(
    plan: Plan, options: CalibrationOptions, decisions: Decisions, processes: int
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
    speed = device_speed(device)
    wide = speed if device == "cpu" else speed * _WIDER
    if not is_reduced(plan, torch_device(device)):
        speed = wide
    tokens = wanted_tokens(plan, options)
    trained = BATCH_TOKENS * decisions.last_stage_steps(plan, options)
    forward = forward_operations(plan)
    merged = plan.merged_layers
    attention = 2 * sum(plan.attention_numbers(layer, kv_heads) for layer, kv_heads in merged)
    # source and student pass all layers, whose inputs are measured
    operations = 2.0 * tokens * (forward + attention)
    if plan.merge_method.trains:
        # two regressions of what is missed, and steps
        operations += (4 * tokens + 3 * BATCH_TOKENS * steps_per_layer(options)) * attention
    # source and student, and the gradients of inputs and of attention
    passes = 4 if decisions.recompute else 3
    operations += trained * (passes * forward + attention)
    written = 0.0
    if mixes(plan, options) and not decisions.no_own_text:
        written = OWN_SHARE * (tokens + trained) * forward / _WRITING_SHARE
    factors = _FACTORS * len(merged) * plan.hidden_size**3
    return ((written + operations / processes) / speed + factors / wide) / 3600


def forward_operations(plan: Plan) -> float:
    """Operations at a token of a forward pass of the source, without those on pairs of tokens."""
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
    return 2 * numbers
