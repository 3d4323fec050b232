"""The summary at the end of a conversion."""

import shlex
from typing import TYPE_CHECKING

from gqa_convert.merging.methods import DEFAULT

from .plan import CACHES, heads_after, heads_before
from .screen import print_note, size, stdout_console, styled

if TYPE_CHECKING:
    from gqa_convert.conversion.run import ConversionResult

_POOLING = ("mean", "first", "random")
"""Methods after which quality is usually poor without uptraining."""


_LITTLE = 0.02
"""Nats per token, below which more training has little to gain."""


def _advice(divergence: float, *, trained: bool) -> str:
    """Whether the result of `fit` is worth more training."""
    if divergence < _LITTLE:
        return "the result predicts nearly what the source predicts: uptraining has little to gain"
    if not trained:
        return (
            "fit's last stage, which trains all layers together, did not run (on a CPU it runs by default up to 200 million "
            "parameters, where memory allows): --kl-steps 200 asks for it, and uptrain with the source as teacher does more"
        )
    return "uptrain with the source as teacher lowers the divergence further; objective and learning rate: docs/uptraining.md"


def show_conversion(result: "ConversionResult") -> None:
    """Print what was converted, the sizes before and after, and the next command."""
    console = stdout_console()
    plan, out, method = result.plan, str(result.out), result.plan.effective_method
    layers = f"in {len(plan.layers)} layers"
    if method == "copy":
        done = f"  {heads_after(plan)} K/V heads {layers}, as in the source: the weights are a copy"
    else:
        done = (
            f"  {heads_before(plan)} -> {heads_after(plan)} K/V heads ({method}) {layers}, "
            f"{len(plan.changes)} tensors changed"
        )
    console.print(styled(("done", "green"), done), soft_wrap=True)
    rows = [(CACHES[key], f"{size(both.before)} -> {size(both.after)}") for key, both in plan.cache_bytes().items()]
    rows.append(("weights", f"{size(plan.checkpoint.weight_bytes)} -> {size(plan.weight_bytes_after)}"))
    divergence = result.calibration.kl if result.calibration else None
    if divergence is not None:
        rows.append(
            ("quality", f"KL divergence from the source: {divergence.after:.3f} nats per token of held-out text")
        )
    rows.append(("folder", out))
    if plan.modeling:
        loading = f"from_pretrained(..., trust_remote_code=True), by {plan.modeling.file}.py beside the weights"
        rows.append(("load it", loading))
    rows.append(("next", shlex.join(["gqa-convert", "verify", out, "--source", plan.checkpoint.source_id])))
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        console.print(f"      {label:<{width}}  {text}", soft_wrap=True)
    if method in _POOLING:
        measure = shlex.join(["gqa-convert", "evaluate", plan.checkpoint.source_id, out, "--data"])
        print_note(f"quality is usually poor after {method} without uptraining; measure it: {measure} TEXT")
        print_note("convert --calibration TEXT loses far less")
    if plan.merge_method.trains and divergence is not None:
        print_note(_advice(divergence.after, trained=bool(result.calibration and result.calibration.kl_steps)))
    if method == DEFAULT.name and result.calibration is not None:
        print_note(f"measured on {result.calibration.text}; convert --calibration TEXT, method fit, loses less")
    for warning in plan.warnings:
        print_note(warning)
