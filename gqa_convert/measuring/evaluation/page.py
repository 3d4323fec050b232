"""A page or a picture of several results: a table for each text, and loss against K/V-cache bytes."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gqa_convert.checkpoint.byte_sizes import size
from gqa_convert.errors import OptionError, ReportError
from gqa_convert.measuring.evaluation.table import columns, notes, short_names, title
from gqa_convert.measuring.pictures import DRAWN_BY, check_picture, save_picture
from gqa_convert.measuring.results import EvaluationFile, ModelScores, load_result, write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class MeasuredText:
    """A text, what was measured on it, once for each model, the cells of its table by their headings, and notes."""

    title: str
    entries: list[ModelScores]
    columns: dict[str, list[str]]
    notes: list[str]


def check_drawings(html: Path | None, plot: Path | None, earlier: Sequence[Path]) -> list[EvaluationFile]:
    """Refuse drawings that can't be made, and read the files of earlier results.

    Raises:
        GQAConvertError: one of its subclasses for each mistake.
    """
    if html is not None:
        check_picture(html, "--html", (".html",))
    if plot is not None:
        check_picture(plot, "--plot")
    if earlier and html is None and plot is None:
        raise OptionError("--with names results to draw: name a page with --html or a picture with --plot")
    files = []
    for path in earlier:
        file = load_result(path)
        if not isinstance(file, EvaluationFile):
            raise ReportError(f"--with {path} holds results of benchmark: name a file that evaluate wrote")
        files.append(file)
    return files


def draw(files: Sequence[EvaluationFile], html: Path | None, plot: Path | None) -> None:
    """Draw results as a page, a picture, or both.

    Args:
        files: the results, at least one.
        html: the page, None for none.
        plot: the picture, None for none.

    Raises:
        OutputError, NoSpaceError: a file can't be written.
    """
    if html is None and plot is None:
        return
    texts = measured_texts(files)
    figure = _figure(texts)
    if plot is not None:
        save_picture(figure, plot)
    if html is not None:
        write_file(html, _page(texts, figure).encode())


def measured_texts(files: Sequence[EvaluationFile]) -> list[MeasuredText]:
    """Results by the text that they were measured on. Entries with the same fingerprint belong to the same model."""
    found: dict[object, MeasuredText] = {}
    models: dict[object, dict[object, ModelScores]] = {}
    for file in files:
        seed = file.seed if file.objective == "spans" else None
        text = (file.data.sha256 or file.data, file.objective, file.context, file.stride, seed)
        entries = models.setdefault(text, {})
        for each in file.entries():
            model = (each.fingerprint or id(each), each.dtype)
            if each.difference or model not in entries:
                entries[model] = each
        rows = list(entries.values())
        names = short_names(rows)
        found[text] = MeasuredText(title(file), rows, columns(rows, names), notes(rows, names))
    return list(found.values())


def _figure(texts: Sequence[MeasuredText]) -> "Figure":
    """Loss against K/V-cache bytes per token; bits per byte where the models of a text count its tokens differently."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    by_token = all(len({each.tokens for each in text.entries}) == 1 for text in texts)
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    ticks: dict[float, str] = {}
    for text in texts:
        points = []
        for each, name in zip(text.entries, text.columns["model"], strict=True):
            value = each.loss if by_token else each.bits_per_byte
            if each.kv_bytes_per_token and value is not None:
                points.append((each.kv_bytes_per_token, value))
                ticks[each.kv_bytes_per_token] = size(each.kv_bytes_per_token)
                axes.annotate(name, points[-1], (5, 5), textcoords="offset points", fontsize=8, parse_math=False)
        label = text.title.replace("$", r"\$")
        axes.plot([nbytes for nbytes, _ in points], [value for _, value in points], "o", label=f"on {label}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
    axes.margins(x=0.15, y=0.15)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), fontsize=8, frameon=False)
    axes.set_xlabel("K/V cache per token")
    axes.set_ylabel("loss (nats per token)" if by_token else "bits per byte")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _page(texts: Sequence[MeasuredText], figure: "Figure") -> str:
    """A page that needs no other file: names are escaped, and the picture is part of it."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    svg = drawn.getvalue()
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("page.html").render(texts=texts, svg=svg[svg.index("<svg") :], mark=DRAWN_BY)
