"""The figures of a report."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gqa_convert.measuring.results.fields import told_apart
from gqa_convert.measuring.results.identifying import SOURCE
from gqa_convert.measuring.results.joining import Joined, Row
from gqa_convert.measuring.results.kv_heads import in_words, mean_heads, order_of
from gqa_convert.measuring.results.records import Benchmark, Origin, Run, Timing
from gqa_convert.publishing.report import drawing


@dataclass(frozen=True)
class Figure:
    """A figure with its caption and origins.

    Attributes:
        name: its id, and part of its file's name.
        title: of the section.
        caption: sentences on what is drawn.
        origins: of the numbers; their commands and machines are stated below the figure.
        svg: with colours that `theme` replaces by the page's.
    """

    name: str
    title: str
    caption: str
    origins: tuple[Origin, ...]
    svg: str


@dataclass(frozen=True)
class Missing:
    """The title of a figure that can't be drawn, and what to run to get it."""

    title: str
    advice: str


def by_label(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each series, a method or the source, which comes first."""
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row.label != SOURCE, row.label)):
        found.setdefault(row.label, []).append(row)
    return found


def setting_of(joined: Joined) -> str:
    """Batch and context of a table's times, in words."""
    batch, context = joined.setting or (0, 0)
    return (
        ", ".join([f"batch {batch}"] * bool(batch) + [f"context {context}"] * bool(context))
        or "batch and context not recorded"
    )


def quality_time(joined: Joined, name: str) -> Figure | None:
    """Loss against decode time with a point per model, the figure for choosing N."""
    points = [
        row
        for row in joined.rows
        if row.score and row.score.loss is not None and row.timing and row.timing.decode is not None
    ]
    if not points or not joined.benchmark:
        return None
    with drawing.style(name):
        figure = drawing.canvas(7.4, 4.4)
        axes = figure.subplots()
        lines = []
        for number, (label, rows) in enumerate(by_label(points).items()):
            lines.append(
                _quality_series(axes, number, label, rows, lambda row: row.timing.decode if row.timing else None)
            )
            spread = [
                ((row.timing.low, row.score.loss), (row.timing.high, row.score.loss))
                for row in sorted(rows, key=lambda row: row.timing.decode or 0.0 if row.timing else 0.0)
                if row.timing
                and row.score
                and row.score.loss is not None
                and row.timing.low is not None
                and row.timing.high is not None
            ]
            drawing.whiskers(axes, f"time-{number}", number, spread)
        axes.set_xlabel("decode time, ms per token")
        axes.set_ylabel("loss, nats per token")
        axes.margins(0.12, 0.16)
        drawing.legend(axes, lines)
        drawn = drawing.svg(figure)
    caption = (
        f"Loss on {joined.text} against decode time of {joined.benchmark.model} ({setting_of(joined)}"
        f"{'; ' if joined.benchmark.detail else ''}{joined.benchmark.detail}), a point per model, joined by N. Lower and further left is better."
        f"{_bars(points)}"
    )
    if any(row.timing and row.timing.low is not None for row in points):
        caption += f" Horizontal bars: {joined.benchmark.spread}."
    return Figure(name, "Quality against time", caption, joined.origins, drawn)


def quality_groups(joined: Joined, name: str) -> Figure | None:
    """Loss against N with a line per method."""
    points = [row for row in joined.rows if row.score and row.score.loss is not None and row.groups]
    if not points:
        return None
    with drawing.style(name):
        figure = drawing.canvas(7.4, 4.2)
        axes = figure.subplots()
        lines = [
            _quality_series(axes, number, label, rows, lambda row: mean_heads(row.groups or 0), noted=False)
            for number, (label, rows) in enumerate(by_label(points).items())
        ]
        drawing.groups_axis(axes, sorted({mean_heads(row.groups) for row in points if row.groups}))
        axes.set_ylabel("loss, nats per token")
        drawing.legend(axes, lines)
        drawn = drawing.svg(figure)
    caption = f"Loss on {joined.text} against N.{_bars(points)}"
    origins = tuple(each for each in joined.origins if joined.benchmark is None or each is not joined.benchmark.origin)
    return Figure(name, "Quality against groups", caption, origins, drawn)


def _bars(rows: Sequence[Row]) -> str:
    """A sentence on the vertical bars, if there are any."""
    return (
        " Vertical bars: one standard error."
        if any(row.score and row.score.loss_error is not None for row in rows)
        else ""
    )


def _quality_series(
    axes: object,
    number: int,
    label: str,
    rows: Sequence[Row],
    across: Callable[[Row], float | None],
    *,
    noted: bool = True,
) -> object:
    """Draw one method's losses with their errors, joined by a line if every N has one model."""
    found = [
        (x, row.score.loss, row)
        for row in rows
        if row.score and row.score.loss is not None and (x := across(row)) is not None
    ]
    placed = sorted(found, key=lambda each: each[:2])
    single = len({row.groups for row in rows}) == len(rows)
    line = drawing.series(axes, f"loss-{number}", number, [(x, y) for x, y, _ in placed], label=label, line=single)
    ends = [
        ((x, y - row.score.loss_error), (x, y + row.score.loss_error))
        for x, y, row in placed
        if row.score and row.score.loss_error is not None
    ]
    drawing.whiskers(axes, f"loss-{number}", number, ends)
    for x, y, row in placed if noted else ():
        drawing.note(axes, f"N = {mean_heads(row.groups or 0):.3g}", (x, y))
    return line


def recovery(runs: Sequence[Run], name: str) -> Figure | None:
    """Held-out loss over the tokens of uptraining, with the source's loss; runs on different texts have own axes."""
    drawable = [run for run in runs if run.curve]
    if not drawable:
        return None
    by_text: dict[float | None, list[tuple[int, Run]]] = {}
    for number, run in enumerate(drawable):  # the same source has the same loss on the same text only
        by_text.setdefault(run.source_loss, []).append((number, run))
    with drawing.style(name):
        figure = drawing.canvas(7.4, 0.6 + 3.6 * len(by_text))
        for place, (axes, (source_loss, together)) in enumerate(
            zip(figure.subplots(len(by_text), 1, squeeze=False)[:, 0], by_text.items(), strict=True)
        ):
            lines = []
            for number, run in together:
                label = drawing.short(f"N = {in_words(run.groups)}, {run.name}" if run.groups else f"run {run.name}")
                lines.append(drawing.series(axes, f"run-{number}", number, run.curve, label=label))
            if source_loss is not None:
                lines.append(drawing.level(axes, f"source-{place}", source_loss, f"source, {source_loss:.3f}"))
            axes.set_xlabel("tokens of uptraining")
            axes.set_ylabel("held-out loss, nats per token")
            axes.xaxis.set_major_formatter(_tokens)
            axes.margins(0.04, 0.1)
            drawing.legend(axes, lines)
        drawn = drawing.svg(figure)
    ends = [_recovered(run) for run in drawable]
    dashed = "; dashed: the source" if any(loss is not None for loss in by_text) else ""
    apart = " Runs whose source has another loss were evaluated on another text or source." if len(by_text) > 1 else ""
    caption = f"Language-model loss on held-out text over the tokens of uptraining{dashed}.{apart} {' '.join(ends)}"
    return Figure(name, "Recovery by uptraining", caption, tuple(run.origin for run in drawable), drawn)


def _recovered(run: Run) -> str:
    title = f"{run.name}{f' (N = {in_words(run.groups)})' if run.groups else ''}"
    if not run.finished:
        return f"{title}: unfinished."
    share = f", {run.recovered:.1%} of the gap to the source recovered" if run.recovered is not None else ""
    losses = (
        f"{run.start:.3f} to {run.final:.3f}"
        if run.start is not None and run.final is not None
        else "not measured at both ends"
    )
    return f"{title}: {losses} nats per token{share}."


def _tokens(value: float, place: int) -> str:
    del place
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:g}{unit}"
    return f"{value:g}"


def time_groups(benchmarks: Sequence[Benchmark], tables: Sequence[Joined], name: str) -> Figure | None:
    """Decode time and K/V bytes per token against N with a line per benchmark, batch and context."""
    rows = [row for joined in tables for row in joined.rows]
    shapes = dict.fromkeys(origin for joined in tables for origin in joined.shapes)
    timed = _settings(benchmarks, lambda timing: timing.decode)
    sized = _settings([each for each in benchmarks if not each.cut], lambda timing: timing.kv_bytes)
    computed: dict[str, set[tuple[float, float]]] = {}
    for row in rows:
        if row.groups and row.kv_bytes is not None and not row.kv_measured:
            computed.setdefault(row.source, set()).add((mean_heads(row.groups), row.kv_bytes))
    parts = ["time"] * bool(timed) + ["bytes"] * bool(sized or computed)
    if not parts:
        return None
    counts = sorted(
        {mean_heads(timing.groups) for _, timings in (*timed, *sized) for timing in timings}
        | {groups for bytes_ in computed.values() for groups, _ in bytes_}
    )
    with drawing.style(name):
        figure = drawing.canvas(7.4, 0.6 + 3.6 * len(parts))  # one above the other, with room for long labels
        for axes, part in zip(figure.subplots(len(parts), 1, squeeze=False)[:, 0], parts, strict=True):
            lines = _times(axes, timed) if part == "time" else _bytes(axes, sized, computed)
            drawing.legend(axes, lines)
            axes.set_title(part)
            axes.set_ylim(bottom=0)
            drawing.groups_axis(axes, counts)
        drawn = drawing.svg(figure)
    caption = (
        " and ".join(["Decode time"] * bool(timed) + ["K/V-cache bytes"] * ("bytes" in parts))
        + " of one token against N."
    )
    details = "; ".join(dict.fromkeys(f"{each.model}: {each.detail}" for each in benchmarks if each.detail))
    if any(timing.low is not None for _, timings in timed for timing in timings):
        caption += f" Bars: {'; '.join(dict.fromkeys(each.spread for each in benchmarks))}."
    caption += f" {details}." if details else ""
    origins = (*(each.origin for each in benchmarks), *shapes)
    return Figure(name, "Time and bytes against groups", caption, origins, drawn)


def _times(axes: Any, timed: Sequence[tuple[str, Sequence[Timing]]]) -> list[Any]:
    """Draw decode times with their spread, and return the lines for the legend."""
    lines = []
    for number, (label, timings) in enumerate(timed):
        points = [(mean_heads(timing.groups), timing.decode) for timing in timings if timing.decode is not None]
        lines.append(drawing.series(axes, f"time-{number}", number, points, label=label))
        ends = [
            ((mean_heads(timing.groups), timing.low), (mean_heads(timing.groups), timing.high))
            for timing in timings
            if timing.low is not None and timing.high is not None
        ]
        drawing.whiskers(axes, f"time-{number}", number, ends)
    axes.set_ylabel("decode time, ms per token")
    return lines


def _bytes(
    axes: Any, sized: Sequence[tuple[str, Sequence[Timing]]], computed: Mapping[str, set[tuple[float, float]]]
) -> list[Any]:
    """Draw the bytes of a token, from live caches and from shapes, and return the lines for the legend."""
    lines = []
    for number, (steps, labels) in enumerate(_alike(sized).items()):
        label = labels[0] if len(labels) == 1 else f"{labels[0]} and {len(labels) - 1} alike"
        lines.append(drawing.series(axes, f"bytes-{number}", number, steps, label=label))
    for number, (source, bytes_) in enumerate(sorted(computed.items())):
        label = f"computed from weights, {drawing.short(source)}"
        lines.append(
            drawing.series(axes, f"computed-{number}", len(sized) + number, sorted(bytes_), label=label, line=False)
        )
    axes.set_ylabel("K/V-cache bytes per token")
    return lines


def _settings(benchmarks: Sequence[Benchmark], of: Callable[[Timing], float | None]) -> list[tuple[str, list[Timing]]]:
    """A series per benchmark, batch and context, in ascending order of N, of the timings that have the value."""
    found = []
    names = told_apart(benchmark.origin.path.with_suffix("") for benchmark in benchmarks)
    for benchmark in benchmarks:
        prefix = f"{names[benchmark.origin.path.with_suffix('')]}: " if len(benchmarks) > 1 else ""
        for batch, context in sorted({timing.setting for timing in benchmark.timings}):
            timings = [each for each in benchmark.timings if each.setting == (batch, context) and of(each) is not None]
            if timings:
                found.append(
                    (
                        drawing.short(f"{prefix}batch {batch}, context {context}"),
                        sorted(timings, key=lambda each: order_of(each.groups)),
                    )
                )
    return found


def _alike(sized: Sequence[tuple[str, Sequence[Timing]]]) -> dict[tuple[drawing.Point, ...], list[str]]:
    """The labels of the series with equal bytes by N, since a cache of any length takes the same bytes per token."""
    found: dict[tuple[drawing.Point, ...], list[str]] = {}
    for label, timings in sized:
        points = tuple(
            (mean_heads(timing.groups), timing.kv_bytes) for timing in timings if timing.kv_bytes is not None
        )
        found.setdefault(points, []).append(label)
    return found
