"""The estimate of a run."""

from typing import TYPE_CHECKING

from .screen import print_note, stdout_console, styled

if TYPE_CHECKING:
    from gqa_convert.training.dry_run import DryRun


def show_dry_run(found: "DryRun") -> None:
    """Print an estimate as tables."""
    from rich.table import Table

    console = stdout_console()
    kind = f" {found.gpu}" if found.gpu else ""
    if found.shards > 1:
        copies = found.gpus // found.shards
        split = f"sharded over {found.shards}" + (f", {copies} copies" if copies > 1 else "")
    else:
        split = "a whole model on each" if found.gpus > 1 else "a whole model"
    console.print(
        styled(("estimate", "green"), f"  {found.model} on {found.gpus}{kind} GPU(s), {split}; nothing was run")
    )

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    counts = found.parameters
    taught = f", teacher {_large(counts['teacher'])}" if found.teacher else ""
    table.add_row("parameters", f"{_large(counts['trained'])} trained of {_large(counts['all'])}{taught}")
    table.add_row(
        "steps",
        f"{found.steps:,} of {found.samples_per_step:,} samples ({found.tokens_per_step:,.0f} tokens), in {found.micro_batches:,} "
        "micro-batch(es) per GPU",
    )
    parts = sorted(found.memory.items(), key=lambda part: -part[1])
    limit = ""
    if found.memory_of_gpu is not None:
        limit = f" of {_bytes(found.memory_of_gpu)}" + ("" if found.fits else ": too much")
    table.add_row("memory per GPU", f"{_bytes(found.memory_needed)}{limit}")
    for name, size in parts:
        table.add_row(f"  {name}", _bytes(size))
    flops = found.flops
    rest = [("forward", flops.forward), ("backward", flops.backward)]
    rest += [
        (name, size) for name, size in (("recomputation", flops.recomputation), ("teacher", flops.teacher)) if size
    ]
    table.add_row("FLOPs per step", f"{flops.total:.3g} ({', '.join(f'{name} {size:.3g}' for name, size in rest)})")
    table.add_row("collectives", "per step" if found.collectives else "none")
    for each in found.collectives:
        table.add_row(
            f"  {each.kind}",
            f"{each.count:,} of {each.of} among {each.processes}: {_bytes(each.bytes)}, of which a GPU sends {_bytes(each.sent)}",
        )
    if found.hours is None:
        table.add_row("time", "unknown without --gpu")
    else:
        table.add_row(
            "time",
            f"{_hours(found.hours)} at {found.utilisation:.0%} of the peak ({found.hours * found.gpus:,.0f} GPU hours)",
        )
    if found.cost is not None:
        table.add_row("cost", f"{found.cost:,.0f} at {found.price:g} per GPU hour")
    table.add_row("text", f"{found.tokens_needed:,} tokens are needed")
    for source, epochs in zip(found.text, found.epochs, strict=True):
        table.add_row(f"  {source.source}", _source(source.tokens, source.bytes, source.complete, epochs))
    console.print(table)
    if found.fits is False:
        print_note(
            "the memory does not suffice: lower micro_batch_size, set gradient_checkpointing to true, or sharding to full with more GPUs",
            console,
        )


def _source(tokens: int | None, size: int | None, complete: bool, epochs: float | None) -> str:
    on_disk = "" if size is None else f"{_bytes(size)} on disk, "
    if tokens is None:
        return f"{on_disk}not tokenised yet" if size is not None else "a Hub dataset of which nothing is on disk yet"
    if not complete:
        return f"{tokens:,} tokens on disk; the rest is streamed"
    return f"{on_disk}{tokens:,} tokens" + ("" if epochs is None else f", read {epochs:.2g} times")


def _large(count: int) -> str:
    for size, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{name}"
    return str(count)


def _bytes(size: int) -> str:
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"


def _hours(hours: float) -> str:
    return (
        f"{hours / 24:.1f} days" if hours >= 72 else f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"
    )
