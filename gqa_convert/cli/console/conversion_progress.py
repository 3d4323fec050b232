"""The progress of a conversion."""

from gqa_convert.conversion.fit.progress import FitProgress
from gqa_convert.conversion.plan import Plan

from .progress import ProgressScreen


class ConversionScreen(ProgressScreen):
    """Shows the stage, the layer, the step and the time left of a conversion."""

    _written = _to_write = 0

    def plan(self, plan: Plan) -> None:
        """Note the size of the result's weights."""
        self._to_write = plan.weight_bytes_after

    def written(self, nbytes: int) -> None:
        """Note that weights were written."""
        self._written += nbytes
        self.show("converting", self._written, self._to_write)

    def layer(self, progress: FitProgress) -> None:
        """Show where the work on layers is."""
        self.show(progress.label, progress.done, progress.total, progress.detail)
        layer, kl = progress.layer, progress.kl
        if progress.note is not None:
            self.say(f"note: {progress.note}")
        if layer is not None and layer.error_vs_mean is not None:
            self.say(
                f"layer {progress.done} of {progress.total}  {layer.module}: {layer.error_vs_mean:.1%} of mean pooling's error remains"
            )
            if layer.error_vs_mean > 1:
                self.say(
                    "note: pooling loses less in that layer: name more text like the model's, or keep more heads there"
                )
        if kl is not None:
            before = f"{kl.before:.4f}, by training all layers together " if kl.after != kl.before else ""
            self.say(f"KL divergence from the source: {before}{kl.after:.4f} nats per token on {kl.text}")
