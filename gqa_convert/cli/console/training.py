"""The progress of an uptraining run and the summary at its end, its estimate, and what was tokenised for it."""

from typing import TYPE_CHECKING

from gqa_convert.checkpoint.byte_sizes import size

from .progress import ProgressScreen
from .screen import print_note, tokens_text
from .tables import show_done

if TYPE_CHECKING:
    from gqa_convert.training.estimate import Estimate
    from gqa_convert.training.metrics import RunSummary, StepMetrics
    from gqa_convert.training.tokenize_only import TokenizedRecipe


def show_step(screen: ProgressScreen, metrics: "StepMetrics", steps: int) -> None:
    """Show a step of an uptraining run that was logged."""
    detail = f"step {metrics.step:,} of {steps:,}"
    if not metrics.skipped:
        detail += f"  loss {metrics.loss:.4f} nats per token"
    detail += f"  {metrics.tokens_per_second:,.0f} tokens/s"
    if metrics.evaluation_loss is not None:
        screen.say(
            f"step {metrics.step:,}: language-model loss on held-out text {metrics.evaluation_loss:.4f} nats per token"
        )
    screen.show("uptraining", metrics.step, steps, detail)


def show_training(summary: "RunSummary") -> None:
    """Print tokens, losses before and after, and where the result is."""
    rows = {}
    evaluation = summary.evaluation
    if evaluation is not None:
        losses = f"{evaluation['start']:.4f} -> {evaluation['final']:.4f} nats per token"
        rows["held-out loss"] = f"{losses} (language-model loss on evaluation_data)"
        if evaluation["source"] is not None:
            rows["source"] = f"{evaluation['source']:.4f}"
        if evaluation["recovered_share"] is not None:
            rows["recovered"] = f"{evaluation['recovered_share']:.1%} of the gap"
    if summary.skipped_steps:
        rows["skipped"] = f"{summary.skipped_steps} step(s), because the gradient was not finite"
    rows["model"] = summary.model
    show_done(f"{tokens_text(summary.tokens)} tokens in {summary.steps:,} steps", rows)


def show_tokenized(found: "TokenizedRecipe") -> None:
    """Print the tokens of each source and where they are."""
    texts = [f"{source.source}: {tokens_text(source.tokens)} tokens" for source in found.sources]
    rows = {"text": "\n".join(texts), "cache": found.cache}
    show_done(f"text for {found.samples:,} samples in {found.steps:,} steps", rows)


def show_estimate(found: "Estimate") -> None:
    """Print the estimate of a run."""
    from gqa_convert.training.estimate import UTILISATION

    trained, whole = tokens_text(found.parameters["trained"]), tokens_text(found.parameters["all"])
    step_tokens = tokens_text(round(found.tokens_needed / found.steps))
    rows = {
        "parameters": f"{trained} trained of {whole}",
        "steps": f"{found.steps:,} of {found.samples_per_step:,} samples ({step_tokens} tokens)",
        "memory per GPU": f"{size(found.memory_needed)}, each parameter over {found.shards} of {found.gpus} GPU(s) ({found.gpu})",
    }
    for name, nbytes in found.memory.items():
        rows[f"  {name}"] = size(nbytes)
    hours = f"{max(found.hours, 0.1):,.1f} hours at {UTILISATION:.0%} of the peak"
    rows["time"] = f"under {hours}" if found.hours < 0.1 else hours
    rows["text"] = f"{tokens_text(found.tokens_needed)} tokens are needed"
    show_done(f"estimate of {found.model}; nothing was run", rows)
    if found.memory_needed > found.memory_of_gpu:
        print_note(
            "the memory of a GPU does not suffice: lower micro_batch_size, set gradient_checkpointing to true, or sharding to full with more GPUs"
        )
