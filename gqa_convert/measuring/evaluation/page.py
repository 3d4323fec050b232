"""A page of results: tables, and a plot of loss against K/V-cache bytes."""

import io
from collections.abc import Sequence
from pathlib import Path

from gqa_convert.errors import MissingExtraError, OptionError, OutputError
from gqa_convert.measuring.results import EvaluationFile, check_folder, load_evaluation, write_file
from gqa_convert.measuring.tables import evaluation_tables, notes, short_names

MARK = "drawn by gqa-convert"
"""By which a page that this program drew is known."""


def check_page(page: Path | None, earlier: Sequence[Path]) -> list[EvaluationFile]:
    """Refuse a page that can't be drawn, before the long work, and read the files of earlier results.

    Raises:
        OptionError: there are earlier results and no page.
        OutputError: the folder of the page is missing, or the file exists, and this program did not draw it.
        MissingExtraError: matplotlib is not installed.
        ReportError: a file holds no results of `evaluate`.
    """
    if page is None:
        if earlier:
            raise OptionError("--with names results to draw: name a page with --html")
        return []
    check_folder(page)
    if page.exists() and (page.is_dir() or MARK.encode() not in page.read_bytes()):
        raise OutputError(f"--html {page} exists and gqa-convert did not draw it: name another file")
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            "matplotlib is not installed, which --html needs: pip install 'gqa-convert[plot]'"
        ) from None
    return [load_evaluation(path) for path in earlier]


def draw_page(files: Sequence[EvaluationFile], page: Path) -> None:
    """Draw results as a page that needs no other file: names are escaped, and the picture is part of it.

    Raises:
        OutputError, NoSpaceError: the page can't be written.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    tables, said = [], []
    for file in files:
        entries = file.entries()
        names = short_names(entries)
        tables += evaluation_tables(file, entries, names)
        said += notes(entries, names)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    drawn = environment.get_template("page.html").render(tables=tables, notes=said, svg=_picture(files), mark=MARK)
    write_file(page, drawn.encode())


def _picture(files: Sequence[EvaluationFile]) -> str:
    """Loss against K/V-cache bytes per token."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for file in files:
        entries = file.entries()
        names = short_names(entries)
        label = "" if file.data is None else file.data.source.replace("$", r"\$")
        points = []
        for each in entries:
            if each.kv_bytes_per_token and each.loss is not None:
                points.append((each.kv_bytes_per_token, each.loss))
                axes.annotate(names[each.model], points[-1], (5, 5), textcoords="offset points", parse_math=False)
        if points:
            axes.plot(*zip(*points, strict=True), "o", label=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(MaxNLocator(5))  # powers of 2 may all lie outside
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.margins(0.15)
    if axes.lines:
        axes.legend()
    axes.set_xlabel("K/V cache per token")
    axes.set_ylabel("loss (nats per token)")
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    svg = drawn.getvalue()
    return svg[svg.index("<svg") :]
