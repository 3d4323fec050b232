"""The progress of a conversion."""

from typing import TYPE_CHECKING

from .progress import ProgressScreen

if TYPE_CHECKING:
    from gqa_convert.conversion.fit.records import LayerRecord, StageProgress, TrainingProgress, TrainingRecord
    from gqa_convert.conversion.plan import Plan

_LAYERS, _TOGETHER = "merging layers", "all layers together"


class ConversionScreen:
    """Shows the stage, the layer, the step and the time left of a conversion.

    Args:
        progress: where they are shown.
    """

    def __init__(self, progress: ProgressScreen) -> None:
        self.say = progress.say
        self._show = progress.show
        self._written = self._to_write = 0

    def note(self, sentence: str) -> None:
        """Print a sentence about the source."""
        self.say(f"note: {sentence}")

    def plan(self, plan: "Plan") -> None:
        """Note the size of the result's weights."""
        self._to_write = plan.weight_bytes_after

    def written(self, nbytes: int) -> None:
        """Note that weights were written."""
        self._written += nbytes
        self._show("converting", self._written, self._to_write)

    def layer(
        self, done: int, total: int, record: "LayerRecord | StageProgress | TrainingProgress | TrainingRecord"
    ) -> None:
        """Show a record of the work on layers; see `gqa_convert.conversion.fit.records.LayerDone`."""
        from gqa_convert.conversion.fit.records import CalibratedRecord, StageProgress, TrainingProgress, TrainingRecord

        if isinstance(record, StageProgress):
            self._stage(done, record)
        elif isinstance(record, TrainingProgress):
            detail = f"step {record.done:,} of {record.total:,}"
            if record.kl is not None:
                detail += f", KL {record.kl:.3f}"
            self._show(_TOGETHER, record.done, record.total, detail)
        elif isinstance(record, TrainingRecord):
            before, after = record.kl.before, record.kl.after
            self.say(f"{_TOGETHER}: KL divergence from the source {before:.4f} -> {after:.4f} nats per token")
        else:
            self._show(_LAYERS, done, total)
            if isinstance(record, CalibratedRecord):
                left = f"{record.gap_left:.1%} of mean pooling's error remains"
                self.say(f"layer {done} of {total}  {record.module}: {left}")

    def _stage(self, done: int, record: "StageProgress") -> None:
        from gqa_convert.conversion.fit.records import Stage

        if record.stage is Stage.OWN_TEXT:
            self._show(str(record.stage), record.step, record.steps)
            return
        detail = str(record.stage)
        if record.layer:
            detail = f"layer {record.layer}: {detail}"
        if record.steps:
            detail += f" {record.step:,} of {record.steps:,}"
        self._show(_LAYERS, done, record.layers, detail)
