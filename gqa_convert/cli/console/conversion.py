"""The summary at the end of a conversion, whose last line says what is known of the quality and what to do about it."""

import shlex
from typing import TYPE_CHECKING

from gqa_convert.checkpoint.byte_sizes import size
from gqa_convert.families.loading import hears
from gqa_convert.merging.methods import CALIBRATED_DEFAULT, COPY, METHODS, REPEAT

from .plan import CACHES, MODELING, heads_after, heads_before
from .screen import print_note
from .tables import show_done

if TYPE_CHECKING:
    from gqa_convert.checkpoint.provenance import CalibrationRecord
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
    plan, out, method = result.plan, str(result.out), result.plan.effective_method
    source = plan.checkpoint.source_id
    heads = f"{heads_before(plan)} -> {heads_after(plan)} K/V heads"
    rows = [(CACHES[key], f"{size(both.before)} -> {size(both.after)}") for key, both in plan.cache_bytes().items()]
    rows.append(("weights", f"{size(plan.checkpoint.weight_bytes)} -> {size(plan.weight_bytes_after)}"))
    if result.calibration is not None and result.calibration.kl is not None:
        kl = result.calibration.kl.after
        rows.append(("quality", f"KL divergence from the source: {kl:.3f} nats per token of held-out text"))
    rows.append(("folder", out))
    if plan.modeling:
        rows.append(("load it", MODELING.format(plan.modeling.file)))
    rows.append(("next", shlex.join(["gqa-convert", "verify", out, "--source", source])))
    show_done(f"{heads} ({method}) in {len(plan.layers)} layers", rows)
    for warning in plan.warnings:
        print_note(warning)
    advice = quality_advice(
        method,
        source,
        out,
        result.calibration,
        last_stage_refused=last_stage_refused,
        trains=not hears(plan.checkpoint.config),
    )
    if advice:
        print_note(advice)


def quality_advice(
    method: str,
    source: str,
    out: str,
    calibration: "CalibrationRecord | None",
    *,
    last_stage_refused: bool = False,
    trains: bool = True,
) -> str | None:
    """Return one line about the quality of a conversion's result; None where no heads were merged.

    Args:
        method: the effective method.
        source: the checkpoint that was converted.
        out: the folder of the result.
        calibration: the text that the method measured on, and the divergence from the source on held-out parts of it.
        last_stage_refused: whether the user asked for no steps of the stage that trains all layers together.
        trains: whether uptrain takes the model.
    """
    if method in (COPY.name, REPEAT.name):
        return None
    measure = f"measure the loss with {shlex.join(['gqa-convert', 'evaluate', source, out, '--data'])} TEXT"
    if METHODS[method].pooling is not None:
        until = " until it is uptrained" if trains else ""
        return f"after {method} the model is often useless{until}: {measure}; {_CALIBRATED} far less"
    if not METHODS[method].trains:
        return f"{measure}; {_CALIBRATED} less"
    if calibration is None or calibration.kl is None:
        return measure
    if calibration.kl.after < _LITTLE:
        return "the result predicts nearly what the source predicts: more training has little to gain"
    ways = []
    if trains:
        ways.append("uptrain with the source as teacher: docs/uptraining.md")
    if not last_stage_refused:
        ways.append(f"train all layers together for longer, with --kl-steps {2 * calibration.kl_steps or 200}")
    return f"to lower the divergence, {'; or '.join(ways)}" if ways else measure
