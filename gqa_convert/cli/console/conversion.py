"""The progress of a conversion, and the summary at its end."""

import shlex

from gqa_convert.conversion.plan import Plan
from gqa_convert.conversion.progress import FitProgress
from gqa_convert.conversion.run import ConversionResult
from gqa_convert.families.loading import read_kind
from gqa_convert.runtime.messages import size

from .plan import CACHES, heads_change, loaded_by, print_notes
from .screen import ProgressScreen, print_note, show_done


def show_conversion(result: ConversionResult) -> None:
    """Print what was converted, the sizes before and after, the next command, and last how to
    measure the quality.
    """
    plan = result.plan
    method = plan.merge_method
    fit = result.calibration
    source = plan.checkpoint.source_id
    out = str(result.out)
    rows = {
        CACHES[key]: f"{size(both.before)} -> {size(both.after)}"
        for key, both in plan.cache_bytes().items()
    }
    rows["weights"] = f"{size(plan.checkpoint.weight_bytes)} -> {size(plan.weight_bytes_after)}"
    if fit and fit.kl:
        rows["quality"] = (
            f"KL divergence from the source: {fit.kl.after:.3f} nats per token on {fit.kl.text}"
        )
    rows["folder"] = out
    rows["loads in"] = loaded_by(plan)
    rows["next"] = shlex.join(["gqa-convert", "verify", out, "--source", source])
    show_done(f"{heads_change(plan)} ({method.name}) in {len(plan.layers)} layers", rows)
    print_notes(plan, fit.left_out if fit else ())
    if method.is_exact:
        return
    evaluation = shlex.join(["gqa-convert", "evaluate", source, out, "--data"])
    data = read_kind(plan.checkpoint.config).upper()
    advice = f"measure the loss with {evaluation} {data}"
    if not method.trains:
        advice += f"; convert --calibration {data}, method fit, loses less"
    print_note(advice)


class ConversionScreen(ProgressScreen):
    """Shows the stage, the layer, the step and the time left of a conversion."""

    _written = _to_write = 0
    _data = "text"

    def plan(self, plan: Plan) -> None:
        """Note the size of the result's weights, and what the model reads."""
        self._to_write = plan.weight_bytes_after
        self._data = read_kind(plan.checkpoint.config)

    def written(self, nbytes: int) -> None:
        """Note that weights were written."""
        self._written += nbytes
        self.show("converting", self._written, self._to_write)

    def layer(self, progress: FitProgress) -> None:
        """Show where the work on layers is."""
        layer, kl = progress.layer, progress.kl
        self.show(progress.label, progress.done, progress.total, progress.detail)
        if progress.note is not None:
            self.say(f"note: {progress.note}")
        if layer is not None and layer.error_vs_mean is not None:
            self.say(
                f"layer {progress.done} of {progress.total}  {layer.module}: "
                f"{layer.error_vs_mean:.1%} of mean pooling's error remains"
            )
            if layer.error_vs_mean > 1:
                self.say(
                    f"note: pooling loses less in that layer: name more {self._data} like the "
                    "model's, or keep more heads there"
                )
        if kl is not None:
            before = ""
            if kl.after != kl.before:
                before = f"{kl.before:.4f}, by training all layers together "
            self.say(
                f"KL divergence from the source: {before}{kl.after:.4f} nats per token on {kl.text}"
            )
