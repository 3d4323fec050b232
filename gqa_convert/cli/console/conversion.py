"""The summary at the end of a conversion, whose last line says what is known of the quality and what to do about it."""

import shlex
from typing import TYPE_CHECKING

from gqa_convert.checkpoint.byte_sizes import size
from gqa_convert.families.loading import hears
from gqa_convert.merging.methods import CALIBRATED_DEFAULT, COPY, REPEAT

from .plan import CACHES, MODELING, heads_after, heads_before
from .screen import print_note
from .tables import show_done

if TYPE_CHECKING:
    from gqa_convert.conversion.run import ConversionResult

_LITTLE = 0.02
"""Nats per token, below which more training has little to gain."""
_CALIBRATED = f"convert --calibration TEXT, method {CALIBRATED_DEFAULT.name}, loses"


def show_conversion(result: "ConversionResult", *, last_stage_refused: bool) -> None:
    """Print what was converted, the sizes before and after, the next command, and last what is known of the quality.

    Args:
        result: of the conversion.
        last_stage_refused: whether the user asked for no steps of the stage that trains all layers together.
    """
    plan, out = result.plan, str(result.out)
    rows = {CACHES[key]: f"{size(both.before)} -> {size(both.after)}" for key, both in plan.cache_bytes().items()}
    rows["weights"] = f"{size(plan.checkpoint.weight_bytes)} -> {size(plan.weight_bytes_after)}"
    if result.calibration is not None and result.calibration.kl is not None:
        kl = result.calibration.kl.after
        rows["quality"] = f"KL divergence from the source: {kl:.3f} nats per token of held-out text"
    rows["folder"] = out
    if plan.modeling:
        rows["load it"] = MODELING.format(plan.modeling.file)
    rows["next"] = shlex.join(["gqa-convert", "verify", out, "--source", plan.checkpoint.source_id])
    heads = f"{heads_before(plan)} -> {heads_after(plan)} K/V heads"
    show_done(f"{heads} ({plan.effective_method}) in {len(plan.layers)} layers", rows)
    for note in (*plan.warnings, _quality_advice(result, last_stage_refused)):
        if note:
            print_note(note)


def _quality_advice(result: "ConversionResult", last_stage_refused: bool) -> str | None:
    """One line about the quality of the result; None where no heads were merged."""
    method, calibration = result.plan.merge_method, result.calibration
    source = result.plan.checkpoint
    is_trainable = not hears(source.config)
    if method in (COPY, REPEAT):
        return None
    compare = shlex.join(["gqa-convert", "evaluate", source.source_id, str(result.out), "--data"])
    measure = f"measure the loss with {compare} TEXT"
    if method.pooling is not None:
        until = " until it is uptrained" if is_trainable else ""
        return f"after {method.name} the model is often useless{until}: {measure}; {_CALIBRATED} far less"
    if not method.trains:
        return f"{measure}; {_CALIBRATED} less"
    if calibration is None or calibration.kl is None:
        return measure
    if calibration.kl.after < _LITTLE:
        return "the result predicts nearly what the source predicts: more training has little to gain"
    ways = []
    if is_trainable:
        ways.append("uptrain with the source as teacher: docs/uptraining.md")
    if not last_stage_refused:
        ways.append(f"train all layers together for longer, with --kl-steps {2 * calibration.kl_steps or 200}")
    return f"to lower the divergence, {'; or '.join(ways)}" if ways else measure
