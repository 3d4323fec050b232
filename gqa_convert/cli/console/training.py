"""The progress of an uptraining run and the summary at its end, its estimate, and what was
tokenised for it.
"""

from typing import TYPE_CHECKING

from gqa_convert.runtime.messages import size

from .screen import ProgressScreen, print_note, show_done

if TYPE_CHECKING:
    from gqa_convert.training.estimate import Estimate
    from gqa_convert.training.metrics import RunSummary, StepMetrics
    from gqa_convert.training.opening import TokenizedRecipe


def show_step(screen: ProgressScreen, metrics: "StepMetrics", steps: int) -> None:
    """Show a step of an uptraining run that was logged."""
    detail = f"step {metrics.step:,} of {steps:,}"
    if not metrics.skipped:
        detail += f"  loss {metrics.loss:.4f} nats per token"
    detail += f"  {metrics.tokens_per_second:,.0f} tokens/s"
    if metrics.evaluation_loss is not None:
        screen.say(
            f"step {metrics.step:,}: language-model loss on held-out text "
            f"{metrics.evaluation_loss:.4f} nats per token"
        )
    screen.show("uptraining", metrics.step, steps, detail)


def show_training(summary: "RunSummary") -> None:
    """Print tokens, losses before and after, and where the result is."""
    rows = {
        f"{name} (held out)": f"{loss:.4f}"
        for name, loss in (summary.evaluation or {}).items()
        if loss is not None
    }
    if summary.skipped_steps:
        rows["skipped"] = f"{summary.skipped_steps} step(s), because the gradient was not finite"
    rows["model"] = summary.model
    show_done(f"{summary.tokens:,} tokens in {summary.steps:,} steps", rows)


def show_tokenized(found: "TokenizedRecipe") -> None:
    """Print the tokens of each source and where they are."""
    rows = {each["source"]: f"{each['tokens']:,} tokens" for each in found.sources}
    show_done(
        f"text for {found.samples:,} samples in {found.steps:,} steps",
        rows | {"cache": found.cache},
    )


def show_estimate(found: "Estimate") -> None:
    """Print the estimate of a run."""
    rows = {f"{name} parameters": f"{count:,}" for name, count in found.parameters.items()}
    rows |= {f"memory for {name}": size(nbytes) for name, nbytes in found.memory.items()}
    rows["memory per GPU"] = (
        f"{size(found.memory_needed)}, each parameter over {found.shards} of {found.gpus} GPU(s) "
        f"({found.gpu})"
    )
    rows["hours"] = f"{found.hours:,.2g}, of arithmetic alone"
    rows["steps"] = f"{found.steps:,}, for which {found.tokens_needed:,} tokens are needed"
    show_done(f"estimate of {found.model}; nothing was run", rows)
    if found.memory_needed > found.memory_of_gpu:
        print_note(
            "the memory of a GPU does not suffice: train on more GPUs, with adapters (lora.rank) "
            "or gradient_checkpointing"
        )
