"""The progress of an uptraining run and the summary at its end, its estimate, and what was tokenised for it."""

from typing import TYPE_CHECKING

from gqa_convert.checkpoint.byte_sizes import size

from .progress import ProgressScreen
from .screen import print_note, stdout_console, styled, tokens_text

if TYPE_CHECKING:
    from gqa_convert.text.on_disk import TextOnDisk
    from gqa_convert.training.dry_run import DryRun
    from gqa_convert.training.metrics import StepReport
    from gqa_convert.training.summary import RunSummary
    from gqa_convert.training.tokenizing import TokenizedRecipe


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
    rows = []
    if summary.adapters:
        rows.append(("trained", f"{summary.adapters}, merged into the model"))
    evaluation = summary.evaluation
    if evaluation:
        losses = f"{evaluation.start:.4f} -> {evaluation.final:.4f} nats per token"
        rows.append(("held-out loss", f"{losses} (language-model loss on evaluation_data)"))
        if evaluation.source is not None:
            share = evaluation.recovered_share
            recovered = "" if share is None else f"; {share:.1%} of the gap recovered"
            rows.append(("source", f"{evaluation.source:.4f}{recovered}"))
    if summary.skipped_steps:
        rows.append(("skipped", f"{summary.skipped_steps} step(s), because the gradient was not finite"))
    rows += [("changed", change) for change in summary.changes]
    rows.append(("curve", summary.plot or "not drawn, matplotlib is missing: pip install 'gqa-convert[plot]'"))
    rows.append(("model", summary.model))
    alpha = "" if summary.alpha is None else f", alpha {summary.alpha:.2g}"
    _show_rows("done", f"{tokens_text(summary.tokens)} tokens in {summary.steps:,} steps{alpha}", rows)


def show_tokenized(found: "TokenizedRecipe") -> None:
    """Print the tokens of each source and where they are."""
    rows = []
    for source in found.sources:
        ready = f"{source.pairs:,} pairs" if source.tokens is None else f"{tokens_text(source.tokens)} tokens"
        rest = "" if source.complete else ", the rest is not needed"
        revision = "" if source.revision is None else f", revision {source.revision}"
        rows.append(("text", f"{source.source}  {ready}{rest}{revision}"))
    rows += [("held out", name) for name in found.evaluation_sources]
    rows.append(("cache", found.cache))
    _show_rows("done", f"text for {found.samples:,} samples in {found.steps:,} steps", rows)


def show_dry_run(found: "DryRun") -> None:
    """Print the estimate of a run."""
    parameters = {name: tokens_text(count) for name, count in found.parameters.items()}
    teacher = f", teacher {parameters['teacher']}" if found.teacher else ""
    step = f"{found.samples_per_step:,} samples ({tokens_text(round(found.tokens_per_step))} tokens)"
    rows = [
        ("parameters", f"{parameters['trained']} trained of {parameters['all']}{teacher}"),
        ("steps", f"{found.steps:,} of {step}, in {found.micro_batches:,} micro-batch(es) per GPU"),
    ]
    limit = "" if found.memory_of_gpu is None else f" of {size(found.memory_of_gpu)}"
    excess = ": too much" if found.fits is False else ""
    rows.append(("memory per GPU", f"{size(found.memory_needed)}{limit}{excess}"))
    largest_first = sorted(found.memory.items(), key=lambda part: -part[1])
    rows += [(f"  {name}", size(nbytes)) for name, nbytes in largest_first]
    flops = found.flops
    parts = {"forward": flops.forward, "backward": flops.backward}
    parts |= {"recomputation": flops.recomputation, "teacher": flops.teacher}
    shares = ", ".join(f"{name} {number:.3g}" for name, number in parts.items() if number)
    rows.append(("FLOPs per step", f"{flops.total:.3g} ({shares})"))
    rows.append(("collectives", "per step" if found.collectives else "none"))
    for each in found.collectives:
        what = f"{each.count:,} of {each.of} among {each.processes}"
        rows.append((f"  {each.kind}", f"{what}: {size(each.bytes)}, of which a GPU sends {size(each.sent)}"))
    if found.hours is None:
        rows.append(("time", "unknown without the type of the GPUs: --hardware 8xh100"))
    else:
        pace = f"{found.utilisation:.0%} of the peak ({found.hours * found.gpus:,.0f} GPU hours)"
        rows.append(("time", f"{_hours(found.hours)} at {pace}"))
    if found.cost is not None:
        rows.append(("cost", f"{found.cost:,.0f} at {found.price:g} per GPU hour"))
    rows.append(("text", f"{tokens_text(found.tokens_needed)} tokens are needed"))
    for text, epochs in zip(found.text, found.epochs, strict=True):
        rows.append((f"  {text.source}", _on_disk(text, epochs)))
    kind = f" {found.gpu}" if found.gpu else ""
    _show_rows("estimate", f"{found.model} on {found.gpus}{kind} GPU(s), {_split(found)}; nothing was run", rows)
    if found.fits is False:
        print_note(
            "the memory does not suffice: lower micro_batch_size, set gradient_checkpointing to true, or sharding to full with more GPUs"
        )


def _split(found: "DryRun") -> str:
    copies = found.gpus // found.shards
    if found.shards == 1:
        return "a whole model on each" if copies > 1 else "a whole model"
    return f"sharded over {found.shards}" + (f", {copies} copies" if copies > 1 else "")


def _on_disk(text: "TextOnDisk", epochs: float | None) -> str:
    """Return what is on disk of a source of text, and how often a run reads it."""
    if text.tokens is None and text.bytes is None:
        return "a Hub dataset of which nothing is on disk yet"
    on_disk = [] if text.bytes is None else [f"{size(text.bytes)} on disk"]
    if text.tokens is None:
        return ", ".join([*on_disk, "not tokenised yet"])
    if not text.complete:
        return f"{tokens_text(text.tokens)} tokens on disk; the rest is streamed"
    read = [] if epochs is None else [f"read {epochs:.2g} times"]
    return ", ".join([*on_disk, f"{tokens_text(text.tokens)} tokens", *read])


def _hours(hours: float) -> str:
    if hours < 1:
        return f"{60 * hours:.1f} minutes"
    return f"{hours:.1f} hours" if hours < 72 else f"{hours / 24:.1f} days"


def _show_rows(mark: str, title: str, rows: list[tuple[str, str]]) -> None:
    """Print a title behind a green word, and rows of a label and a text."""
    console = stdout_console()
    console.print(styled((mark, "green"), f"  {title}"), soft_wrap=True)
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        console.print(f"      {label:<{width}}  {text}", soft_wrap=True)
