"""What a run has come to, in figures."""

from typing import Any

from gqa_convert.training.checkpoints import Progress
from gqa_convert.training.recipe import Recipe


def recovery(evaluations: dict[str, float], final: float | None) -> dict[str, float | None] | None:
    """Losses on the evaluation data, and the share of the gap between start and source that is closed.

    Args:
        evaluations: at the `start` and of the `source`, as far as they were measured.
        final: at the end.
    """
    if "start" not in evaluations or final is None:
        return None
    start, source = evaluations["start"], evaluations.get("source")
    share = None if source is None or start <= source else (start - final) / (start - source)
    return {"start": start, "source": source, "final": final, "recovered_share": share}


def summarise(recipe: Recipe, progress: Progress, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The summary of a run that has taken all its steps.

    Args:
        recipe: of the run.
        progress: at its end.
        lines: of its metrics file.
    """
    last = lines[-1] if lines else {}
    return {
        "steps": progress.step,
        "tokens": progress.tokens,
        "alpha": progress.tokens / recipe.pretraining_tokens if recipe.pretraining_tokens else None,
        "skipped_steps": progress.skipped,
        "changes": progress.changes,
        "final_loss": last.get("loss"),
        "evaluation": recovery(progress.evaluations, last.get("evaluation_loss")),
    }
