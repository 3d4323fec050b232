"""Makes a report: finds results, joins them, draws figures and writes the pages."""

import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gqa_convert.checkpoint.atomic_files import atomic_file
from gqa_convert.checkpoint.ownership import set_aside
from gqa_convert.checkpoint.paths import local_path
from gqa_convert.checkpoint.results import Result
from gqa_convert.errors import OptionError, OutputError
from gqa_convert.measuring.pictures import check_matplotlib
from gqa_convert.measuring.results.finding import find
from gqa_convert.measuring.results.joining import Joined, join
from gqa_convert.measuring.results.records import Material
from gqa_convert.publishing.report import drawing
from gqa_convert.publishing.report.figures import Figure, Missing, quality_groups, quality_time, recovery, time_groups
from gqa_convert.publishing.report.heatmap import merge_errors
from gqa_convert.publishing.report.pages import MARKER, Report, html_page, markdown_page
from gqa_convert.publishing.report.tables import tables_of
from gqa_convert.publishing.report.theme import standalone
from gqa_convert.publishing.report.verdict import verdicts

HTML, MARKDOWN, FIGURE = "report.html", "report.md", "report-{}.svg"


@dataclass(frozen=True, slots=True)
class DrawnFigure:
    """A figure of a report and its file."""

    name: str
    title: str
    file: str


@dataclass(frozen=True, slots=True)
class ReadFile:
    """A file that a report uses, and what it is."""

    file: str
    kind: str


@dataclass(frozen=True, slots=True)
class IgnoredFile:
    """A file that a report does not use, and the reason."""

    file: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportResult(Result):
    """What `make_report` wrote.

    Attributes:
        out: the folder.
        html, markdown: the pages.
        figures: that were drawn.
        missing: figures that could not be drawn, and what they need.
        rows: the number of models in the tables by N.
        read, ignored: the files that were found.
        notes: sentences on contradictions.
    """

    out: str
    html: str
    markdown: str
    figures: tuple[DrawnFigure, ...]
    missing: tuple[Missing, ...]
    rows: int
    read: tuple[ReadFile, ...]
    ignored: tuple[IgnoredFile, ...]
    notes: tuple[str, ...]


def make_report(
    folders: Sequence[str | Path], out: str | Path | None = None, *, overwrite: bool = False
) -> ReportResult:
    """Make tables and plots from the JSON of convert, uptrain, evaluate and benchmark.

    Args:
        folders: to search, four levels deep; a JSON file may be named directly.
        out: the folder for `report.html`, `report.md` and `report-*.svg`; by default `report` in the first folder, or
            beside it if that is a checkpoint or a file.
        overwrite: rename files of these names that `report` did not write (to `report.html.old`), rather than refuse.

    Raises:
        ReportError: a folder is missing, a file is broken, or nothing was found.
        OutputError: the output can't be written, or holds other files of these names.
        MissingExtraError: matplotlib is not installed.
    """
    if not folders:
        raise OptionError("there is no folder: name one with results of convert, uptrain, evaluate or benchmark")
    check_matplotlib("report")
    places = [local_path(folder) for folder in folders]
    material = find(places)
    target = _default(places[0]) if out is None else local_path(out)
    tables, notes = join(material)
    figures, missing = draw_all(material, tables)
    report = Report(
        title=f"gqa-convert report: {', '.join(dict.fromkeys(place.resolve().name for place in places))}",
        verdict=verdicts(tables),
        tables=tables_of(material, tables),
        figures=figures,
        missing=missing,
        notes=notes,
        read=material.read,
        ignored=[(str(path), why) for path, why in material.ignored],
    )
    files = {figure.name: FIGURE.format(figure.name) for figure in figures}
    contents = {
        files[figure.name]: f'<?xml version="1.0" encoding="utf-8"?>\n{MARKER}\n{standalone(figure.svg)}\n'
        for figure in figures
    }
    contents |= {MARKDOWN: markdown_page(report, files), HTML: html_page(report)}
    _write(target, contents, overwrite=overwrite)
    return ReportResult(
        out=str(target),
        html=str(target / HTML),
        markdown=str(target / MARKDOWN),
        figures=tuple(DrawnFigure(each.name, each.title, str(target / files[each.name])) for each in figures),
        missing=tuple(missing),
        rows=sum(len(each.rows) for each in tables),
        read=tuple(ReadFile(str(origin.path), what) for origin, what in material.read),
        ignored=tuple(IgnoredFile(str(path), why) for path, why in material.ignored),
        notes=tuple(notes),
    )


def _default(first: Path) -> Path:
    """The default folder: within a run's folder, but not within a checkpoint, which is published as a whole."""
    if first.is_file() or (first / "config.json").is_file():
        place = first.resolve()
        return place.parent / f"{place.stem if first.is_file() else place.name}-report"
    return first / "report"


def _write(target: Path, contents: dict[str, str], *, overwrite: bool) -> None:
    """Write all files or none, the page last, and remove figures of an earlier report that this one lacks.

    Raises:
        OutputError: the folder can't be written, or holds files of these names that `report` did not write.
    """
    made = not target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        foreign = [name for name in contents if (target / name).exists() and not _ours(target / name)]
        if foreign and not overwrite:
            raise OutputError(
                f"{target / foreign[0]} exists and report did not write it: name another folder with --out, or rename the file with --overwrite"
            )
        for name in foreign:
            set_aside(target / name)
        with ExitStack() as stack:  # which renames them in reverse, once all are on the disk
            for name, text in reversed(contents.items()):
                file = stack.enter_context(atomic_file(target / name))
                file.write(text.encode("utf-8"))
                file.flush()
                os.fsync(file.fileno())
        for path in target.glob(FIGURE.format("*")):
            if path.name not in contents and _ours(path):
                path.unlink()
    except OSError as problem:
        if made:
            with suppress(OSError):
                target.rmdir()
        raise OutputError(
            f"{target} can't be written ({problem.strerror}: {problem.filename or target}): name another folder with --out"
        ) from None


def _ours(path: Path) -> bool:
    """Whether `report` wrote the file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return MARKER.encode() in file.read(500)


def draw_all(material: Material, tables: Sequence[Joined]) -> tuple[list[Figure], list[Missing]]:
    """The figures for which there are results, and what the others need."""
    figures: list[Figure | None] = []
    for number, joined in enumerate(tables, 1):
        several = len(tables) > 1
        suffix, text = (f"-{number}", f": {drawing.short(joined.text or '')}") if several else ("", "")
        for draw, name in ((quality_time, "quality-time"), (quality_groups, "quality-groups")):
            figure = draw(joined, f"{name}{suffix}")
            figures += [replace(figure, title=figure.title + text)] if figure else []
    figures += [
        recovery(material.runs, "recovery"),
        time_groups(material.benchmarks, tables, "time-groups"),
        *merge_errors(material.conversions, material.inspections, "merge-error"),
    ]
    drawn = [figure for figure in figures if figure is not None]
    return drawn, _missing({figure.title.partition(":")[0] for figure in drawn}, material)


def _missing(drawn: set[str], material: Material) -> list[Missing]:
    evaluate = "gqa-convert evaluate MODEL... --data TEXT --json > RUN_DIR/evaluate.json"
    benchmark = "gqa-convert benchmark MODEL --groups N,... --json > RUN_DIR/benchmark.json"
    wanted = [evaluate] * (not material.evaluations) + [benchmark] * (not material.benchmarks)
    advice = {
        "Quality against time": f"run {' and '.join(wanted)}"
        if wanted
        else "benchmark an N of a model that was evaluated, or evaluate a model that was timed",
        "Quality against groups": f"run {evaluate}"
        if not material.evaluations
        else "no model with a finite loss has a known N",
        "Recovery by uptraining": "run gqa-convert uptrain RECIPE.yaml with evaluation_data in the recipe",
        "Time and bytes against groups": f"run {benchmark}",
        "Merge error by layer": "run gqa-convert convert SOURCE RUN_DIR/OUT --groups N",
    }
    found = [Missing(title, text) for title, text in advice.items() if title not in drawn]
    if "Time and bytes against groups" in drawn and not material.benchmarks:
        found.append(Missing("Time against groups", f"run {benchmark}"))
    return found
