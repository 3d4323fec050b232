"""What a person sees, on stderr: progress, tables, summaries. Scripts read stdout, where only `--json` writes."""

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from gqa_convert.plan import Plan


CACHES = {"kv_bytes_per_token": "K/V cache per token", "cross_kv_bytes_per_encoder_token": "cross cache per encoder token"}
"""What a plan's figures of caches are called."""


def stderr_console() -> "Console":
    from rich.console import Console

    class Patient(Console):
        def on_broken_pipe(self) -> None:
            """Nobody reads any more, which is no reason to end the program."""

    console = Patient(stderr=True, highlight=False)
    if not console.is_terminal:
        console.width = 120  # files and pipes have no width; long lines must not break names apart
    return console


def print_json(value: dict[str, Any]) -> None:
    """The one JSON object on stdout."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()


def size(nbytes: float) -> str:
    """Bytes as people read them: 1.2 GB, 98.3 kB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(nbytes) < 1000 or unit == "GB":
            return f"{nbytes:,.0f} {unit}" if unit == "bytes" else f"{nbytes:,.1f} {unit}"
        nbytes /= 1000
    raise AssertionError


@contextmanager
def byte_progress(label: str, total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar in bytes with rate and time left; nothing where stderr is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr_console(), transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda nbytes: progress.advance(task, nbytes)


@contextmanager
def layer_progress(*, quiet: bool) -> Iterator[Callable[[int, int, dict[str, Any]], None]]:
    """A bar that counts attention layers while they are merged, and a line for each that was fitted; only the lines without a terminal."""
    if quiet:
        yield lambda done, total, record: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr_console(), transient=True, disable=not sys.stderr.isatty()) as progress:
        tasks: list[TaskID] = []

        def advance(done: int, total: int, record: dict[str, Any]) -> None:
            if not tasks:
                tasks.append(progress.add_task("merging layers", total=total))
            progress.update(tasks[0], completed=done, visible=done < total)
            if "gap_left" in record:
                progress.console.print(
                    f"layer {done} of {total}  {record['module']}: {record['gap_left']:.1%} of mean pooling's error left"
                )

        yield advance


@contextmanager
def stage_progress(*, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """One bar per stage of the work, each with its time left; nothing where stderr is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

    tasks: dict[str, TaskID] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr_console(), transient=True) as progress:

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done, total=total)

        yield advance


class TrainingScreen:
    """What an uptraining run shows: messages, and a bar where stderr is a terminal, else a line now and then.

    A terminal that is closed or a pipe that breaks does not end the run.
    """

    _SECONDS = 30.0

    def __init__(self, bars: "Progress | None", *, quiet: bool) -> None:
        self._bars, self._quiet = bars, quiet
        self._console = stderr_console() if bars is None else bars.console
        self._tasks: dict[str, TaskID] = {}
        self._paces: dict[str, tuple[float, int]] = {}
        self._shown = -self._SECONDS

    def say(self, message: str) -> None:
        if not self._quiet:
            with suppress(OSError):
                self._console.print(message, soft_wrap=True, markup=False)

    def tokenize(self, label: str, done: int, total: int) -> None:
        self._advance(f"tokenising {label}", done, total, self._left("tokens", done, total))

    def step(self, line: dict[str, Any]) -> None:
        """A line of the metrics file, with `steps` of the whole run."""
        step, steps = line["step"], line["steps"]
        parts = [
            f"loss {line['loss']:.4f}" if line.get("loss") is not None else "no finite loss",
            f"{line['tokens_per_second']:,.0f} tokens/s",
        ]
        if line.get("mfu") is not None:
            parts.append(f"MFU {line['mfu']:.1%}")
        text = "  ".join(filter(None, [*parts, self._left("steps", step, steps)]))
        if line.get("evaluation_loss") is not None:
            self.say(f"step {step:,}: evaluation loss {line['evaluation_loss']:.4f}")
        if self._bars is None and (time.monotonic() - self._shown > self._SECONDS or step == steps):
            self._shown = time.monotonic()
            self.say(f"step {step:,} of {steps:,} ({step / steps:.1%})  {text}")
        self._advance("uptraining", step, steps, text)

    def _left(self, what: str, done: int, total: int) -> str:
        """Time left at the pace since this process began: what an earlier one did says nothing about it."""
        began, first = self._paces.setdefault(what, (time.monotonic(), done))
        if not first < done < total:
            return ""
        seconds = round((time.monotonic() - began) / (done - first) * (total - done))
        days, hours = divmod(seconds // 3600, 24)
        clock = f"{hours}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        return f"{days} d {clock} left" if days else f"{clock} left"

    def _advance(self, label: str, done: int, total: int, text: str) -> None:
        if self._bars is None:
            return
        with suppress(OSError):
            if label not in self._tasks:
                self._tasks[label] = self._bars.add_task(label, total=total, text=text)
            self._bars.update(self._tasks[label], completed=done, text=text, visible=done < total or label == "uptraining")


@contextmanager
def training_progress(*, quiet: bool) -> "Iterator[TrainingScreen]":
    """Loss, tokens per second, share of the budget and time left."""
    if quiet or not sys.stderr.isatty():
        yield TrainingScreen(None, quiet=quiet)
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[text]}"))
    bars = Progress(*columns, console=stderr_console(), transient=True)
    bars.start()
    try:
        yield TrainingScreen(bars, quiet=quiet)
    finally:
        with suppress(OSError):
            bars.stop()


def show_training(summary: dict[str, Any]) -> None:
    """The summary at the end of a run."""
    console = stderr_console()
    alpha = "" if summary["alpha"] is None else f", alpha {summary['alpha']:.2g}"
    console.print(f"[green]done[/green]  {summary['tokens']:,} tokens in {summary['steps']:,} steps{alpha}")
    evaluation = summary["evaluation"]
    if evaluation:
        console.print(f"      evaluation loss  {evaluation['start']:.4f} -> {evaluation['final']:.4f} nats per token")
    if evaluation and evaluation["source"] is not None:
        share = evaluation["recovered_share"]
        recovered = "" if share is None else f"; {share:.1%} of the gap recovered"
        console.print(f"      source           {evaluation['source']:.4f}{recovered}")
    if summary["skipped_steps"]:
        console.print(f"      [yellow]{summary['skipped_steps']} step(s) had no finite gradient and changed nothing[/yellow]")
    for change in summary["changes"]:
        console.print(f"      {change}", soft_wrap=True, markup=False)
    plot = summary["plot"] or "not drawn, matplotlib is missing: pip install 'gqa-convert[plot]'"
    console.print(f"      curve            {plot}", soft_wrap=True, markup=False)
    console.print(f"      model            {summary['model']}", soft_wrap=True, markup=False)


def show_plan(plan: "Plan") -> None:
    """The plan as tables: what changes per layer, then what it brings."""
    from rich.table import Table

    from gqa_convert.families import ENGINES

    console = stderr_console()
    console.print(
        f"[bold]{plan.checkpoint.source_id}[/bold]: {plan.family.model_type}, {plan.heads} query heads, "
        f"{plan.source_kv_heads} -> [bold]{plan.groups}[/bold] K/V heads in {len(plan.layers)} attention layers"
    )
    changes = Table("layers", "tensor", "before", "after", "type", "method", title="What changes", title_justify="left")
    for layers, tensor, before, after, dtype, method in _runs_of_layers(plan):
        changes.add_row(layers, tensor, before, after, dtype, method)
    console.print(changes)
    totals = Table("", "before", "after", "ratio", title="What it brings", title_justify="left")
    rows: list[tuple[str, int, int, Callable[[float], str]]] = [
        ("parameters", plan.parameters_before, plan.parameters_after, lambda n: f"{n:,}"),
        ("weights", plan.checkpoint.weight_bytes, plan.weight_bytes_after, size),
    ]
    rows += [(CACHES[key], both["before"], both["after"], size) for key, both in plan.cache_bytes().items()]
    for label, was, becomes, shown in rows:
        totals.add_row(label, shown(was), shown(becomes), f"{becomes / was:.3f}")
    console.print(totals)
    split, copied = plan.tensor_parallel_degrees()
    console.print(f"disk needed:      {size(plan.disk_bytes)}")
    unknown = "no" if plan.modeling else "not known to"
    known = [f"{engine} {'yes' if engine in plan.loads_in else unknown}" for engine in ENGINES]
    console.print(f"loads as it is:   {', '.join(known)}")
    if plan.home:
        console.print(
            f"route:            translated to {plan.home.model_type}, a stock class that computes the same (--no-native: keep {plan.family.model_type})"
        )
    if plan.modeling:
        console.print(f"loads with code:  transformers 5, trust_remote_code=True, by {plan.modeling.file}.py, which is written beside it")
    degrees = ", ".join(map(str, split))
    if copied:
        degrees += f"; with copied K/V heads (vLLM) also {', '.join(map(str, copied))}"
    console.print(f"tensor parallel:  {degrees}")
    for warning in plan.warnings:
        console.print(f"[yellow]note:[/yellow] {warning}")


def _runs_of_layers(plan: "Plan") -> Iterator[tuple[str, str, str, str, str, str]]:
    """Rows of the plan's table; layers in which the same tensor changes in the same way share a row."""
    rows: dict[tuple[str, str, str, str, str], list[str]] = {}
    for change in plan.changes:
        number = next((part for part in change.module.split(".") if part.isdigit()), "-")
        tensor = change.name.removeprefix(change.module.rsplit(".", 1)[0] + ".")
        key = (tensor, str(list(change.before)), str(list(change.after)), change.dtype, change.method)
        rows.setdefault(key, []).append(number)
    for key, numbers in rows.items():
        yield (_ranges(numbers), *key)


def _ranges(numbers: list[str]) -> str:
    """["0", "1", "2", "5"] -> "0-2, 5"."""
    if not all(number.isdigit() for number in numbers):
        return ", ".join(numbers)
    ordered = sorted(map(int, numbers))
    runs: list[list[int]] = []
    for number in ordered:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def show_inspection(result: dict[str, Any]) -> None:
    """What each layer loses at each N, darker where it is more; losses and a recommendation where text was given."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console = stderr_console()
    layers, groups = result["layers"], result["groups"]
    highest = max(error[part] for layer in layers for error in layer["errors"] for part in ("keys", "values")) or 1.0

    def shaded(number: float) -> Text:
        light = 1 - 0.75 * number / highest
        return Text(f"{number:.2f}", style=f"black on rgb({round(255 * light)},{round(255 * (0.4 + 0.6 * light))},255)")

    console.print(
        f"[bold]{result['source']}[/bold]: {result['model_type']}, {result['kv_heads']} K/V heads in {len(layers)} attention layers",
        soft_wrap=True,
    )
    measured = "on calibration text" if result["calibration"] else "of the weights alone"
    console.print(f"Relative error of keys (K) and values (V) merged into N heads, {measured}", soft_wrap=True)
    columns = [f"{part}{count}" for part in "KV" for count in groups]
    table = Table("layer", *columns, "cheapest pairs of heads", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for layer in layers:
        cells = [shaded(error[part]) for part in ("keys", "values") for error in layer["errors"]]
        pairs = (f"{'+'.join(map(str, pair['heads']))} {pair['error']:.2f}" for pair in layer["cheapest_pairs"])
        table.add_row(layer["label"], *cells, "  ".join(pairs))
    console.print(table)
    for part in ("key", "value"):
        if reason := next((layer[f"{part}_barrier"] for layer in layers if layer[f"{part}_barrier"]), None):
            console.print(f"[yellow]note:[/yellow] {part}s are averaged where nothing can be absorbed, since {reason}", soft_wrap=True)
    _show_prediction(result)
    if result["plot"]:
        console.print(f"plot     {result['plot']}", soft_wrap=True, markup=False)


def _show_prediction(result: dict[str, Any]) -> None:
    """Losses by N, and what to run next."""
    from rich.table import Table

    console = stderr_console()
    if result["calibration"] is None:
        console.print("no loss is predicted and no N recommended from weights alone: name text with --calibration", soft_wrap=True)
        return
    loss, advice = result["loss"], result["recommendation"]
    if result["calibration"]["warning"]:
        console.print(f"[yellow]note:[/yellow] {result['calibration']['warning']}", soft_wrap=True)
    console.print(f"Predicted loss in nats per token over {loss['tokens']:,} held-out tokens", soft_wrap=True)
    table = Table("N", "loss", "increase")
    for each in ({"groups": f"{result['kv_heads']} (source)", "loss": loss["source"], "increase": None}, *loss["by_groups"]):
        numbers = ("" if each[key] is None else format(each[key], form) for key, form in (("loss", ".4f"), ("increase", "+.4f")))
        table.add_row(str(each["groups"]), *numbers)
    console.print(table)
    console.print(
        "an upper bound: this is the closed form alone, without the closed loop and its gradient stage; convert --calibration loses less",
        soft_wrap=True,
    )
    mark = "[yellow]no N fits[/yellow]" if advice["groups"] is None else "[green]recommended[/green]"
    console.print(f"{mark}  {advice['reason']}", soft_wrap=True)
    if advice["command"]:
        console.print(f"next     {advice['command']}", soft_wrap=True, markup=False)


def show_conversion(result: dict[str, Any]) -> None:
    """The one summary at the end of a conversion."""
    console = stderr_console()
    console.print(
        f"[green]done[/green]  {result['source_kv_heads']} -> {result['groups']} K/V heads ({result['method']}) in "
        f"{result['attention_layers']} layers, {len(result['changes'])} tensors changed"
    )
    sizes = [(CACHES[key], result[key]) for key in CACHES if key in result] + [("weights", result["weight_bytes"])]
    rows = [(label, f"{size(both['before'])} -> {size(both['after'])}") for label, both in sizes]
    rows.append(("where", result["out"]))
    if result["modeling_file"]:
        rows.append(("load it", f"from_pretrained(..., trust_remote_code=True), by {result['modeling_file']} beside the weights"))
    rows.append(("next", shlex.join(["gqa-convert", "verify", result["out"], "--source", result["source"]])))
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        console.print(f"      {label:<{width}}  {text}", soft_wrap=True, markup=False)


def show_verification(report: dict[str, Any]) -> None:
    """Every check with its outcome."""
    console = stderr_console()
    for check in report["checks"]:
        mark = "[green]ok  [/green]" if check["passed"] else "[red]FAIL[/red]"
        console.print(f"{mark}  {check['name']:<22} {check['detail']}", soft_wrap=True)
    consequence = "it is not what a conversion of SOURCE makes; unless it was trained since, do not use it"
    console.print("[green]verified[/green]" if report["passed"] else f"[red]not verified: {consequence}[/red]")


def show_demo(summary: dict[str, Any]) -> None:
    """What each N loses and gains, by the mean and by fitting."""
    from rich.table import Table

    console = stderr_console()
    table = Table(
        "N", "K/V bytes per token", "parameters", "mean", "lost", "fit", "lost", "of mean's loss", "verified",
        title=f"Loss in nats per token over {summary['held_out_tokens']:,} held-out tokens, nothing trained; "
        f"fit has seen {summary['calibration_tokens']:,} tokens of calibration text", title_justify="left",
    )  # fmt: skip
    base = summary["results"][0]["loss"]
    for result in summary["results"]:
        fit = result.get("fit")
        lost = result["loss"] - base
        fitted = (f"{fit['loss']:.3f}", f"{fit['loss'] - base:+.3f}", f"{(fit['loss'] - base) / lost:.1%}") if fit else ("", "", "")
        verified = all(each["verified"] for each in (result, fit or result))
        table.add_row(
            str(result["groups"]), f"{result['kv_bytes_per_token']:,}", f"{result['parameters']:,}", f"{result['loss']:.3f}", f"{lost:+.3f}",
            *fitted, "yes" if verified else "[red]NO[/red]",
        )  # fmt: skip
    console.print(table)
    if summary["uptraining"]:
        _show_recovery(summary["uptraining"])
    console.print(f"results  {summary['results_file']}", soft_wrap=True)
    plot = summary["plot"] or "not drawn, matplotlib is missing: pip install 'gqa-convert[plot]'"
    console.print(f"plot     {plot}", soft_wrap=True, markup=False)


def _show_recovery(uptraining: dict[str, Any]) -> None:
    """What uptraining brought back, point by point."""
    from rich.table import Table

    source = uptraining["evaluation"]["source"]
    console = stderr_console()
    table = Table(
        "tokens", "loss", "lost",
        title=f"Uptraining of the fitted N = {uptraining['groups']} with the source as teacher, on {uptraining['alpha']:.1%} of its training "
        f"tokens (source {source:.3f} on this part of the text)", title_justify="left",
    )  # fmt: skip
    for point in uptraining["curve"]:
        table.add_row(f"{point['tokens']:,}", f"{point['loss']:.3f}", f"{point['loss'] - source:+.3f}")
    console.print(table)
