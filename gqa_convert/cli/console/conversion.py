"""The summary at the end of a conversion."""

import shlex

from gqa_convert.checkpoint.byte_sizes import size
from gqa_convert.conversion.run import ConversionResult
from gqa_convert.merging.methods import COPY, REPEAT

from .plan import CACHES, heads_change, loaded_by
from .screen import print_note
from .tables import show_done


def show_conversion(result: ConversionResult) -> None:
    """Print what was converted, the sizes before and after, the next command, and last how to measure the quality."""
    plan, out = result.plan, str(result.out)
    source = plan.checkpoint.source_id
    rows = {CACHES[key]: f"{size(both.before)} -> {size(both.after)}" for key, both in plan.cache_bytes().items()}
    rows["weights"] = f"{size(plan.checkpoint.weight_bytes)} -> {size(plan.weight_bytes_after)}"
    if result.calibration is not None and result.calibration.kl is not None:
        kl = result.calibration.kl
        rows["quality"] = f"KL divergence from the source: {kl.after:.3f} nats per token on {kl.text}"
    rows["folder"] = out
    rows["loads in"] = loaded_by(plan)
    rows["next"] = shlex.join(["gqa-convert", "verify", out, "--source", source])
    show_done(f"{heads_change(plan)} ({plan.merge_method.name}) in {len(plan.layers)} layers", rows)
    left_out = () if result.calibration is None else result.calibration.left_out
    for note in (*plan.warnings, *(f"left out: {sentence}" for sentence in left_out)):
        print_note(note)
    method = plan.merge_method
    if method in (COPY, REPEAT):
        return
    advice = f"measure the loss with {shlex.join(['gqa-convert', 'evaluate', source, out, '--data'])} TEXT"
    if not method.trains:
        advice += "; convert --calibration TEXT, method fit, loses less"
    print_note(advice)
