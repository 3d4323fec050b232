"""The summary at the end of a conversion, whose last line says what is known of the quality and what to do about it."""

import shlex
from typing import TYPE_CHECKING

from gqa_convert.checkpoint.byte_sizes import size
from gqa_convert.merging.methods import CALIBRATED_DEFAULT, COPY, METHODS, REPEAT

from .plan import CACHES, heads_after, heads_before
from .screen import print_note, stdout_console, styled

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
    console = stdout_console()
    plan, out, method = result.plan, str(result.out), result.plan.effective_method
    layers = f"in {len(plan.layers)} layers"
    if method == COPY.name:
        kept = "a copy"
        if plan.target_architecture:
            kept = f"translated to {plan.target_architecture.model_type}"
        done = f"{heads_after(plan)} K/V heads {layers}, as in the source: the weights are {kept}"
    else:
        heads = f"{heads_before(plan)} -> {heads_after(plan)} K/V heads"
        done = f"{heads} ({method}) {layers}, {len(plan.changes)} tensors changed"
    console.print(styled(("done", "green"), f"  {done}"), soft_wrap=True)
    rows = [(CACHES[key], f"{size(both.before)} -> {size(both.after)}") for key, both in plan.cache_bytes().items()]
    rows.append(("weights", f"{size(plan.checkpoint.weight_bytes)} -> {size(plan.weight_bytes_after)}"))
    divergence = result.calibration.kl if result.calibration else None
    if divergence is not None:
        kl = f"KL divergence from the source: {divergence.after:.3f} nats per token of held-out text"
        rows.append(("quality", kl))
    rows.append(("folder", out))
    if plan.modeling:
        loading = f"from_pretrained(..., trust_remote_code=True), by {plan.modeling.file}.py beside the weights"
        rows.append(("load it", loading))
    source = plan.checkpoint.source_id
    rows.append(("next", shlex.join(["gqa-convert", "verify", out, "--source", source])))
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        console.print(f"      {label:<{width}}  {text}", soft_wrap=True)
    for warning in plan.warnings:
        print_note(warning)
    advice = quality_advice(method, source, out, result.calibration, last_stage_refused=last_stage_refused)
    if advice:
        print_note(advice)


def quality_advice(
    method: str, source: str, out: str, calibration: "CalibrationRecord | None", *, last_stage_refused: bool = False
) -> str | None:
    """Return one line about the quality of a conversion's result; None where no heads were merged.

    Args:
        method: the effective method.
        source: the checkpoint that was converted.
        out: the folder of the result.
        calibration: the text that the method measured on, and the divergence from the source on held-out parts of it.
        last_stage_refused: whether the user asked for no steps of the stage that trains all layers together.
    """
    if method in (COPY.name, REPEAT.name):
        return None
    measure = f"{shlex.join(['gqa-convert', 'evaluate', source, out, '--data'])} TEXT"
    if METHODS[method].pooling is not None:
        return f"after {method} the model is often useless until it is uptrained: measure it with {measure}; {_CALIBRATED} far less"
    if calibration is None or calibration.kl is None:
        less = "" if METHODS[method].trains else f"; {_CALIBRATED} less"
        return f"the loss of quality was not measured: measure it with {measure}{less}"
    if not METHODS[method].trains:
        return f"the divergence was measured on {calibration.text}; {_CALIBRATED} less, and evaluate compares both models on other text"
    if calibration.kl.after < _LITTLE:
        return "the result predicts nearly what the source predicts: uptraining has little to gain"
    uptrain = "uptrain with the source as teacher: docs/uptraining.md"
    if calibration.kl_steps:  # docs/real-model.md, Uptraining
        more = f"--kl-steps {2 * calibration.kl_steps} lowers the divergence further"
        return (
            f"{more}, on a model of 135 million parameters as much as uptraining on as many tokens did; then {uptrain}"
        )
    if last_stage_refused:
        return f"to lower the divergence, {uptrain}"
    return (
        "fit's last stage, which trains all layers together, did not run (by default it does on a CPU up to 200 million "
        "parameters, where memory allows): --kl-steps 200 asks for it, and uptrain with the source as teacher does more, with lora in less memory"
    )
