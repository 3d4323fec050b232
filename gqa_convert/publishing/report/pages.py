"""A report as one HTML file and as Markdown."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gqa_convert.measuring.results.fields import printable
from gqa_convert.measuring.results.records import Origin
from gqa_convert.publishing.report.figures import Figure, Missing
from gqa_convert.publishing.report.tables import Table, provenance_of
from gqa_convert.publishing.report.theme import inline, variables

MARKER = "<!-- made by gqa-convert report; it may replace this file -->"
"""A file that begins with this, or has it on its second line, is a report's."""

_STYLE = """
:root { color-scheme: light dark; LIGHT }
@media (prefers-color-scheme: dark) { :root { DARK } }
body { margin: 0 auto; max-width: 78rem; padding: 1.5rem; background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem; }
figure { margin: 1rem 0; } figure svg { display: block; max-width: 100%; height: auto; }
figcaption, .note { max-width: 60rem; font-size: .9rem; }
.origins { color: var(--muted); font-size: .85rem; overflow-wrap: anywhere; margin: .5rem 0; padding: 0; list-style: none; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .55rem; border-bottom: 1px solid var(--grid); text-align: right; vertical-align: top; }
th { border-bottom-color: var(--muted); vertical-align: bottom; }
td.words, th.words { text-align: left; overflow-wrap: anywhere; min-width: 9rem; }
td.none { color: var(--muted); font-style: italic; }
code { font-family: ui-monospace, monospace; font-size: .95em; }
"""


@dataclass(frozen=True)
class Report:
    """What both pages hold.

    Attributes:
        title: of the page.
        tables, figures: in order.
        missing: figures that could not be drawn.
        notes: sentences on contradictions and on what could not be joined.
        read: of every file that was used: its origin and what it is.
        ignored: path and why.
    """

    title: str
    tables: Sequence[Table]
    figures: Sequence[Figure]
    missing: Sequence[Missing]
    notes: Sequence[str]
    read: Sequence[tuple[Origin, str]]
    ignored: Sequence[tuple[str, str]]

    def files(self) -> list[Table]:
        """What was read and what was not, as tables."""
        used = [(str(origin.path), what, origin.created or "not recorded") for origin, what in self.read]
        tables = [
            Table("files", "Files", "What the figures were taken from.", ("file ", "kind ", "created "), tuple(used))
        ]
        if self.ignored:
            tables.append(
                Table(
                    "ignored",
                    "Ignored files",
                    "These hold nothing for a report.",
                    ("file ", "why "),
                    tuple(self.ignored),
                )
            )
        return tables


def html_page(report: Report) -> str:
    """The whole report in a file: no scripts, and nothing that would be loaded from elsewhere."""
    style = _STYLE.replace("LIGHT", variables(dark=False)).replace("DARK", variables(dark=True))
    parts = [
        "<!DOCTYPE html>",
        MARKER,
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(report.title)}</title>",
        f"<style>{style}</style>",
        "</head>",
        "<body>",
        f"<h1>{_text(report.title)}</h1>",
    ]
    if report.notes:
        parts += [
            '<section id="notes">',
            "<h2>To be noted</h2>",
            "<ul>",
            *(f"<li>{_text(note)}</li>" for note in report.notes),
            "</ul>",
            "</section>",
        ]
    first, *others = [*report.tables, *report.files()]
    parts += [_html_table(first), *map(_html_figure, report.figures)]
    if report.missing:
        items = [f"<li>{_text(each.title)}: {_text(each.advice)}</li>" for each in report.missing]
        parts += ['<section id="missing">', "<h2>Not drawn</h2>", "<ul>", *items, "</ul>", "</section>"]
    parts += [*map(_html_table, others), "</body>", "</html>"]
    return "\n".join(parts) + "\n"


def _text(text: str) -> str:
    return html.escape(printable(text))


def _unbroken(cell: str) -> str:
    """A figure that keeps its error or its spread on one line."""
    return _text(cell).replace("± ", "±&nbsp;").replace(" to ", "&nbsp;to&nbsp;")


def _html_origins(origins: Sequence[Origin]) -> str:
    items = []
    for command, machine, files in provenance_of(origins):
        shown = f"<code>{_text(command)}</code>" if command else "not recorded"
        items.append(f"<li>Command: {shown}. Machine: {_text(machine)}. From {_text(files)}.</li>")
    return f'<ul class="origins">{"".join(items)}</ul>' if items else ""


def _html_figure(figure: Figure) -> str:
    width = figure.svg.partition('width="')[2].partition("pt")[0]
    tag = f'<svg role="img" aria-label="{_text(figure.title)}" style="min-width: {width}px" '  # three quarters of its size; then scrolled
    drawn = inline(figure.svg, figure.name).replace("<svg ", tag, 1)
    return "\n".join(
        [
            "<section>",
            f"<h2>{_text(figure.title)}</h2>",
            f'<figure id="{figure.name}" aria-label="{_text(figure.title)}">',
            f'<div class="scroll" tabindex="0">{drawn}</div>',
            f"<figcaption>{_text(figure.caption)}{_html_origins(figure.origins)}</figcaption>",
            "</figure>",
            "</section>",
        ]
    )


def _html_table(table: Table) -> str:
    words = [title.endswith(" ") for title in table.header]
    head = "".join(
        f'<th scope="col"{_class(word, "")}>{_text(title.strip())}</th>'
        for title, word in zip(table.header, words, strict=True)
    )
    rows = [
        "<tr>"
        + "".join(
            f"<td{_class(word, cell)}>{_text(cell) if word else _unbroken(cell)}</td>"
            for cell, word in zip(row, words, strict=True)
        )
        + "</tr>"
        for row in table.rows
    ]
    return "\n".join(
        [
            f'<section id="table-{table.name}">',
            f"<h2>{_text(table.title)}</h2>",
            f'<p class="note">{_text(table.note)}</p>',
            '<div class="scroll" tabindex="0">',
            f"<table><thead><tr>{head}</tr></thead><tbody>",
            *rows,
            "</tbody></table>",
            "</div>",
            _html_origins(table.origins),
            "</section>",
        ]
    )


def _class(word: bool, cell: str) -> str:
    names = ["words"] * word + ["none"] * (cell == "not measured")
    return f' class="{" ".join(names)}"' if names else ""


def markdown_page(report: Report, files: dict[str, str]) -> str:
    """The report as Markdown.

    Args:
        report: what it holds.
        files: by name of the figure, the SVG file beside the page.
    """
    first, *others = [*report.tables, *report.files()]
    parts = [MARKER, f"# {_mark(report.title)}"]
    if report.notes:
        parts += ["## To be noted", "\n".join(f"- {_mark(note)}" for note in report.notes)]
    parts += _markdown_table(first)
    for figure in report.figures:
        parts += [
            f"## {_mark(figure.title)}",
            f"![{_mark(figure.title)}]({files[figure.name]})",
            _mark(figure.caption),
            _markdown_origins(figure.origins),
        ]
    if report.missing:
        parts += ["## Not drawn", "\n".join(f"- {_mark(each.title)}: {_mark(each.advice)}" for each in report.missing)]
    for table in others:
        parts += _markdown_table(table)
    return "\n\n".join(part for part in parts if part) + "\n"


def _mark(text: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"([\\`*_{}\[\]#|~$])", r"\\\1", html.escape(printable(text), quote=False))


def _markdown_origins(origins: Sequence[Origin]) -> str:
    lines = []
    for command, machine, files in provenance_of(origins):
        shown = f"<code>{_mark(command)}</code>" if command else "not recorded"
        lines.append(f"- Command: {shown}. Machine: {_mark(machine)}. From {_mark(files)}.")
    return "\n".join(lines)


def _markdown_table(table: Table) -> list[str]:
    rule = [":--" if title.endswith(" ") else "--:" for title in table.header]
    lines = [
        [_mark(title.strip()) for title in table.header],
        rule,
        *([_mark(cell) for cell in row] for row in table.rows),
    ]
    rows = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return [f"## {_mark(table.title)}", _mark(table.note), rows, _markdown_origins(table.origins)]
