"""The summary at the end of a conversion."""

import shlex
from typing import TYPE_CHECKING

from gqa_convert.checkpoint.byte_sizes import size

from .advice import quality_advice
from .plan import CACHES, heads_after, heads_before
from .screen import print_note, stdout_console, styled

if TYPE_CHECKING:
    from gqa_convert.conversion.run import ConversionResult


def show_conversion(result: "ConversionResult") -> None:
    """Print what was converted, the sizes before and after, the next command, and last what is known of the quality."""
    console = stdout_console()
    plan, out, method = result.plan, str(result.out), result.plan.effective_method
    layers = f"in {len(plan.layers)} layers"
    if method == "copy":
        kept = "the weights are a copy"
        if plan.target_architecture:
            kept = f"the weights are translated to {plan.target_architecture.model_type}"
        done = f"  {heads_after(plan)} K/V heads {layers}, as in the source: {kept}"
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
    for warning in plan.warnings:
        print_note(warning)
    if advice := quality_advice(method, plan.checkpoint.source_id, out, result.calibration):
        print_note(advice)
