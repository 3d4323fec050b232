"""Axes and series in the report's colours, and the SVG of a figure, which depends on nothing but its numbers."""

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gqa_convert.publishing.report.theme import GRID, GROUND, INK, MARKERS, MUTED, SERIES

_LONGEST = 44
"""Maximum characters of a name in a figure."""
_MARKED = 100
"""Maximum points of a series with markers."""
_INSIDE, _COLUMN = 6, 20
"""Maximum entries of a legend inside the axes, and of each column of a legend beside them."""

_STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "path.simplify": False,
    "font.size": 10.0,
    "figure.facecolor": GROUND,
    "axes.facecolor": GROUND,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 11.0,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": GRID,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "legend.fontsize": 9.0,
}

_PLACES = [
    (across * distance, up * distance)
    for distance in (6, 15, 24, 36, 50)
    for across, up in ((1, 1), (1, -2.2), (-1, 1), (-1, -2.2), (0, 1.5), (0, -3))
]
"""Places of a note around its point, in points to the right and upwards, in the order in which they are tried."""


@contextmanager
def style(salt: str) -> Iterator[None]:
    """A context with the report's style instead of the user's; `salt` makes the ids depend on the figure alone."""
    from matplotlib.style import context

    with warnings.catch_warnings(), context(["default", {**_STYLE, "svg.hashsalt": salt}]):
        warnings.filterwarnings(
            "ignore", message="Glyph .* missing"
        )  # text stays text, and the reader's browser has the glyph
        yield


def canvas(width: float, height: float) -> Any:
    """A figure of the given size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def svg(figure: Any) -> str:
    """The figure as an SVG element without date and creator, with labels that do not overlap."""
    figure.draw_without_rendering()  # the layout has to be known
    for axes in figure.axes:
        if axes.get_xscale() == "log":  # the axis of N, whose labels say no more than their places
            _thin_out(axes.xaxis)
        _place_notes(axes)
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = file.getvalue()
    return re.sub(r"[ \t]+$", "", text[text.index("<svg") :], flags=re.MULTILINE).strip()


def short(text: str) -> str:
    """A name shortened in the middle."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2 - 1]}…{text[-(_LONGEST // 2) :]}"


def groups_axis(axes: Any, groups: Sequence[float]) -> None:
    """Make the x axis a logarithmic axis of N with a tick at each N that occurs. Where layers differ, N is their mean."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xlabel("groups N (K/V heads per layer)")
    axes.xaxis.set_major_locator(FixedLocator(list(groups)))
    axes.xaxis.set_major_formatter(FixedFormatter([f"{count:.3g}" for count in groups]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(groups[0] / 1.25, groups[-1] * 1.25)


Point = tuple[float, float]


def series(axes: Any, name: str, number: int, points: Sequence[Point], *, label: str, line: bool = True) -> Any:
    """Draw a line with markers, whose group in the SVG has the id `series-NAME`, and return it for the legend."""
    colour, marker = SERIES[number % len(SERIES)], MARKERS[number % len(MARKERS)]
    shown = marker if len(points) <= _MARKED else ""
    style_ = ("-", "--", ":", "-.")[number // len(SERIES) % 4] if line else "none"
    return axes.plot(
        *zip(*points, strict=True),
        color=colour,
        marker=shown,
        markersize=6,
        markeredgewidth=0,
        linewidth=1.6,
        linestyle=style_,
        label=label,
        gid=f"series-{name}",
        zorder=3,
        clip_on=False,
    )[0]


def whiskers(axes: Any, name: str, number: int, ends: Sequence[tuple[Point, Point]]) -> None:
    """Draw error bars with the ids `error-NAME-0` and so on."""
    for place, (low, high) in enumerate(ends):
        flat = low[1] == high[1]
        axes.plot(
            [low[0], high[0]],
            [low[1], high[1]],
            color=SERIES[number % len(SERIES)],
            linewidth=1.1,
            marker="|" if flat else "_",
            markersize=6,
            gid=f"error-{name}-{place}",
            zorder=2,
        )


def level(axes: Any, name: str, value: float, label: str) -> Any:
    """A dashed horizontal line."""
    return axes.axhline(value, color=MUTED, linestyle=(0, (5, 3)), linewidth=1.3, label=label, gid=f"series-{name}")


def note(axes: Any, text: str, point: Point) -> None:
    """Write a word beside a point."""
    axes.annotate(
        text, point, xytext=_PLACES[0], textcoords="offset points", fontsize=9, color=INK, zorder=4
    ).set_in_layout(False)


def _place_notes(axes: Any) -> None:
    """Move each note of the axes to the first place around its point that no other text takes."""
    from matplotlib.text import Annotation

    taken = [axes.get_legend().get_window_extent()] if axes.get_legend() else []
    for each in (text for text in axes.texts if isinstance(text, Annotation)):
        for across, up in _PLACES:
            each.set(position=(across, up), ha="left" if across > 0 else "right" if across < 0 else "center")
            box = each.get_window_extent()
            if not any(_overlap(box, other) for other in taken):
                break
        taken.append(box)


def _thin_out(axis: Any) -> None:
    """Hide the tick labels that would overlap the one before them."""
    last = None
    for tick in axis.get_major_ticks():
        box = tick.label1.get_window_extent()
        if last is not None and tick.label1.get_text() and _overlap(last, box):
            tick.label1.set_visible(False)
        else:
            last = box


def _overlap(one: Any, other: Any) -> bool:
    """Whether two boxes share more than an edge."""
    return bool(one.x0 < other.x1 and other.x0 < one.x1 and one.y0 < other.y1 and other.y0 < one.y1)


def legend(axes: Any, lines: Sequence[Any]) -> None:
    """Add a legend, beside the axes if it has many entries."""
    beside = (
        {"loc": "upper left", "bbox_to_anchor": (1.01, 1.02), "ncols": -(-len(lines) // _COLUMN)}
        if len(lines) > _INSIDE
        else {}
    )
    axes.legend(list(lines), [line.get_label() for line in lines], **beside)
