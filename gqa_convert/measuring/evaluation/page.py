"""A page or a picture of several results: a table for each text, and loss against K/V-cache bytes."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gqa_convert.errors import MissingExtraError, OptionError, OutputError
from gqa_convert.measuring.evaluation.table import notes, rows, short_names, title
from gqa_convert.measuring.results import EvaluationFile, ModelScores, check_folder, load_evaluation, write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


FORMATS = (".png", ".svg", ".pdf")
DRAWN_BY = "drawn by gqa-convert"
"""The mark by which a file that this program drew is known."""


@dataclass(frozen=True)
class MeasuredText:
    """A text, what was measured on it, once for each model, the rows of its table, and notes."""

    title: str
    entries: list[ModelScores]
    rows: list[dict[str, str]]
    notes: list[str]


def check_drawings(html: Path | None, plot: Path | None, earlier: Sequence[Path]) -> list[EvaluationFile]:
    """Refuse drawings that can't be made, and read the files of earlier results.

    Raises:
        GQAConvertError: one of its subclasses for each mistake.
    """
    if html is not None:
        _check_drawing(html, "--html", (".html",))
    if plot is not None:
        _check_drawing(plot, "--plot", FORMATS)
    if earlier and html is None and plot is None:
        raise OptionError("--with names results to draw: name a page with --html or a picture with --plot")
    return [load_evaluation(path) for path in earlier]


def _check_drawing(path: Path, option: str, formats: tuple[str, ...]) -> None:
    """Refuse a picture, or a page with one, that could not be drawn, before the long work.

    Raises:
        OptionError: the suffix of the file is unknown.
        OutputError: the folder of the file is missing, or the file exists, and this program did not draw it.
        MissingExtraError: matplotlib is not installed.
    """
    if path.suffix.lower() not in formats:
        raise OptionError(f"{option} {path}: name a file that ends in one of {', '.join(formats)}")
    check_folder(path)
    if path.exists() and (path.is_dir() or DRAWN_BY.encode() not in path.read_bytes()):
        raise OutputError(f"{option} {path} exists and gqa-convert did not draw it: name another file")
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            f"matplotlib is not installed, which {option} needs: pip install 'gqa-convert[plot]'"
        ) from None


def draw(files: Sequence[EvaluationFile], html: Path | None, plot: Path | None) -> None:
    """Draw results as a page, a picture in the format of its file's suffix, or both, marked as drawn by this program.

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
        kind = plot.suffix[1:].lower()
        picture = io.BytesIO()
        figure.savefig(picture, format=kind, dpi=150, metadata={"Software" if kind == "png" else "Creator": DRAWN_BY})
        write_file(plot, picture.getvalue())
    if html is not None:
        write_file(html, _page(texts, figure).encode())


def measured_texts(files: Sequence[EvaluationFile]) -> list[MeasuredText]:
    """Results by the text that they were measured on. Entries with the same fingerprint belong to the same model."""
    texts: dict[object, list[EvaluationFile]] = {}
    for file in files:
        if file.data is not None:
            texts.setdefault((file.data.sha256 or file.data, file.objective, file.context), []).append(file)
    return [_measured_text(each) for each in texts.values()]


def _measured_text(files: Sequence[EvaluationFile]) -> MeasuredText:
    models: dict[object, ModelScores] = {}
    for file in files:
        for each in file.entries():
            model = (each.fingerprint or id(each), each.dtype)
            if each.difference or model not in models:
                models[model] = each
    entries = list(models.values())
    names = short_names(entries)
    return MeasuredText(title(files[-1]), entries, rows(entries, names), notes(entries, names))


def _figure(texts: Sequence[MeasuredText]) -> "Figure":
    """Loss against K/V-cache bytes per token; bits per byte where the models of a text count its tokens differently."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    by_token = all(len({each.tokens for each in text.entries}) == 1 for text in texts)
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for text in texts:
        nbytes, values = [], []
        for each, row in zip(text.entries, text.rows, strict=True):
            value = each.loss if by_token else each.bits_per_byte
            if each.kv_bytes_per_token and value is not None:
                nbytes.append(each.kv_bytes_per_token)
                values.append(value)
                place = (each.kv_bytes_per_token, value)
                axes.annotate(row["model"], place, (5, 5), textcoords="offset points", fontsize=8, parse_math=False)
        axes.plot(nbytes, values, "o", label="on " + text.title.replace("$", r"\$"))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(MaxNLocator(5))  # powers of 2 may all lie outside
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.margins(0.15)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), fontsize=8, frameon=False)
    axes.set_xlabel("K/V cache per token")
    axes.set_ylabel("loss (nats per token)" if by_token else "bits per byte")
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
