"""The progress of an uptraining run, and the summary at its end."""

from typing import TYPE_CHECKING

from .progress import ProgressScreen
from .screen import stdout_console, styled

if TYPE_CHECKING:
    from gqa_convert.training.metrics import StepReport
    from gqa_convert.training.summary import RunSummary


class TrainingScreen:
    """Shows the progress of an uptraining run.

    Args:
        progress: where it is shown.
    """

    def __init__(self, progress: ProgressScreen) -> None:
        self.say = progress.say
        self._show = progress.show

    def tokenize(self, label: str, done: int, total: int) -> None:
        """Show how many tokens of a text, or of one that is being generated, are ready."""
        from gqa_convert.text.generating import GENERATING

        self._show(label if label == GENERATING else f"tokenising {label}", done, total)

    def step(self, report: "StepReport") -> None:
        """Show a step that was logged."""
        from gqa_convert.training.metrics import LM_LOSS

        line = report.line
        loss = "no finite loss" if line.loss is None else f"{line.objective} {line.loss:.4f} nats per token"
        if len(line.parts) > 1:
            loss += f" ({', '.join(f'{name} {value:.4f}' for name, value in line.parts.items())})"
        pace = f"{line.tokens_per_second:,.0f} tokens/s"
        if line.mfu is not None:
            pace += f"  MFU {line.mfu:.1%}"
        if line.evaluation_loss is not None:
            self.say(f"step {line.step:,}: {LM_LOSS} on held-out text {line.evaluation_loss:.4f} nats per token")
        self._show("uptraining", line.step, report.steps, f"step {line.step:,} of {report.steps:,}  {loss}  {pace}")


def show_training(summary: "RunSummary") -> None:
    """Print tokens, losses before and after, and where the result is."""
    console = stdout_console()
    alpha = "" if summary.alpha is None else f", alpha {summary.alpha:.2g}"
    console.print(styled(("done", "green"), f"  {summary.tokens:,} tokens in {summary.steps:,} steps{alpha}"))
    if summary.adapters:
        console.print(f"      trained          {summary.adapters}, merged into the model", soft_wrap=True)
    evaluation = summary.evaluation
    if evaluation:
        change = f"{evaluation.start:.4f} -> {evaluation.final:.4f} nats per token"
        console.print(f"      held-out loss    {change} (language-model loss on evaluation_data)", soft_wrap=True)
    if evaluation and evaluation.source is not None:
        share = evaluation.recovered_share
        recovered = "" if share is None else f"; {share:.1%} of the gap recovered"
        console.print(f"      source           {evaluation.source:.4f}{recovered}")
    if summary.skipped_steps:
        console.print(
            styled(
                "      ",
                (f"{summary.skipped_steps} step(s) were skipped because the gradient was not finite", "yellow"),
            )
        )
    for change in summary.changes:
        console.print(f"      {change}", soft_wrap=True)
    plot = summary.plot or "not drawn, matplotlib is missing: pip install 'gqa-convert[plot]'"
    console.print(f"      curve            {plot}", soft_wrap=True)
    console.print(f"      model            {summary.model}", soft_wrap=True)
