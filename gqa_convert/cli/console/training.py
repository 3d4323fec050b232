"""The summary at the end of an uptraining run."""

from typing import TYPE_CHECKING

from .screen import stdout_console, styled

if TYPE_CHECKING:
    from gqa_convert.training.summary import RunSummary


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
