"""Tables of docs/results/README.md from the measurements.

    python -m benchmarks.real.report [--page docs/results/README.md]

What lies between `<!-- begin NAME -->` and `<!-- end NAME -->` is written anew; the rest of the page stays.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.pages import filled, table
from benchmarks.records import Cell

from .__main__ import OUTPUT
from .conversions import METHODS
from .folders import SMOLLM2
from .text import KINDS

PAGE = Path("docs/results/README.md")
MISSING = "Not measured yet."
DEPTHS = (5, 25, 50, 75, 95)
"""Percent of the text before each needle of earlier records, which hold `needle` in place of `retrieval`."""
Data = dict[str, Any]


class Row(NamedTuple):
    """One method with one amount of calibration text, and the cells of its seeds."""

    method: str
    calibration: str | None
    calibration_tokens: int | None
    cells: list[Cell]


def rows(data: Data) -> list[Row]:
    """Every combination that has been measured, in the order of methods."""
    found: dict[tuple[str, str | None, int | None], list[Cell]] = {}
    for cell in data["cells"]:
        key = (cell["method"], cell["calibration"], cell["calibration_tokens"])
        found.setdefault(key, []).append(cell)
    order = list(METHODS)
    keys = sorted(found, key=lambda key: (order.index(key[0]), key[1] or "", key[2] or 0))
    return [Row(*key, found[key]) for key in keys]


def source_scores(data: Data) -> Cell:
    found: Cell = data["models"].get(SMOLLM2, {}).get("scores", {})
    return found


def windows(data: Data) -> list[str]:
    """The window lengths of the source's scores, ascending."""
    found = {window for each in source_scores(data).get("loss", {}).values() for window in each}
    return sorted(found, key=int)


def losses(scores: Cell, kind: str, window: str) -> Cell | None:
    found: Cell | None = scores.get("loss", {}).get(kind, {}).get(window)
    return found


def over_seeds(cells: list[Cell], value: Callable[[Cell], float | None]) -> list[float]:
    return [found for cell in cells if (found := value(cell)) is not None]


def _of(kind: str, window: str, name: str) -> Callable[[Cell], float | None]:
    def value(cell: Cell) -> float | None:
        found = losses(cell, kind, window)
        return None if found is None else found[name]

    return value


def with_error(row: Row, kind: str, window: str, name: str) -> str:
    """The mean over seeds, the standard error over units of text, and the range over seeds."""
    values = over_seeds(row.cells, _of(kind, window, name))
    if not values:
        return ""
    errors = over_seeds(row.cells, _of(kind, window, f"{name}_error"))
    text = f"{statistics.mean(values):.3f}"
    text += f" ± {statistics.mean(errors):.3f}" if errors else ""
    return text + (f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else "")


def retrieval(cell: Cell) -> dict[str, Cell]:
    """What was found at each length."""
    found: dict[str, Cell] = cell.get("retrieval") or cell.get("needle") or {}
    return found


def share_found(cells: list[Cell]) -> str:
    """The share over all lengths and seeds."""
    each = [length["found"] for cell in cells for length in retrieval(cell).values()]
    return f"{100 * statistics.mean(each):.0f}%" if each else ""


def results_table(data: Data) -> str:
    """One row per method, at the window length of the most rows."""
    known = windows(data)
    if not data["cells"] or not known:
        return MISSING
    window = max(known, key=lambda each: (sum(bool(losses(cell, KINDS[0], each)) for cell in data["cells"]), int(each)))
    lines = []
    for row in rows(data):
        line = [row.method, " to ".join(f"{each:.1f}" for each in _ends(cell["minutes"] for cell in row.cells))]
        line += [_before_and_after(data, row, kind, window) for kind in KINDS]
        line += [with_error(row, kind, window, "kl") for kind in KINDS]
        found = share_found(row.cells)
        lines.append([*line, f"{share_found([source_scores(data)])} -> {found}" if found else ""])
    header = ["method", "minutes", *(f"loss, {kind}" for kind in KINDS), *(f"KL, {kind}" for kind in KINDS), "needles"]
    return f"Windows of {int(window):,} tokens:\n\n{table(header, lines)}"


def _ends(values: Iterable[float]) -> list[float]:
    """The least and the largest, or one where they are the same."""
    every = sorted(values)
    return [every[0], every[-1]] if every[0] != every[-1] else every[:1]


def _before_and_after(data: Data, row: Row, kind: str, window: str) -> str:
    """The source's loss, the mean over seeds, and the share of mean pooling's gap that is closed."""
    before = losses(source_scores(data), kind, window)
    after = over_seeds(row.cells, _of(kind, window, "loss"))
    if not before or not after:
        return ""
    text = f"{before['loss']:.3f} -> {statistics.mean(after):.3f}"
    pooled = [cell for cell in data["cells"] if cell["method"] == "mean"]
    gap = over_seeds(pooled, _of(kind, window, "excess"))
    if not gap or not gap[0] or row.method == "mean":
        return text
    added = statistics.mean(over_seeds(row.cells, _of(kind, window, "excess")))
    return f"{text}, {100 * (1 - added / gap[0]):.1f}%"


def windows_table(data: Data) -> str:
    """The KL of the methods that were measured at several window lengths."""
    lines = []
    known = windows(data)
    for row in rows(data):
        for kind in KINDS:
            divergence = [with_error(row, kind, window, "kl") for window in known]
            if sum(map(bool, divergence)) > 1:
                lines.append([row.method, kind, *divergence])
    header = ["method", "text", *(f"KL, {each}" for each in known)]
    return table(header, lines) if lines else MISSING


def _all_rows(data: Data) -> list[tuple[str, list[Cell]]]:
    """The source and then the results, each with its cells."""
    return [("source", [source_scores(data)]), *((row.method, row.cells) for row in rows(data))]


def retrieval_table(data: Data) -> str:
    """Shares found by length, and by kind of question or depth over all lengths."""
    lengths = sorted({length for _, cells in _all_rows(data) for cell in cells for length in retrieval(cell)}, key=int)
    parts = [name for _, cells in _all_rows(data) for cell in cells for name in _parts(cell)]
    header = ["method", *(f"{int(length):,} tokens" for length in lengths), *dict.fromkeys(parts)]
    lines = []
    for label, cells in _all_rows(data):
        measured = [cell for cell in cells if retrieval(cell)]
        shares = [
            [retrieval(cell)[length]["found"] for cell in measured if length in retrieval(cell)] for length in lengths
        ]
        shares += [[_parts(cell)[name] for cell in measured if name in _parts(cell)] for name in dict.fromkeys(parts)]
        if measured:
            lines.append([label, *(f"{100 * statistics.mean(each):.0f}%" if each else "" for each in shares)])
    return table(header, lines) if lines else MISSING


def _parts(cell: Cell) -> dict[str, float]:
    """The shares of each kind of question, or at each depth of earlier records, over all lengths."""
    found: dict[str, list[float]] = {}
    for length in retrieval(cell).values():
        depths = {f"depth {depth}%": share for depth, share in zip(DEPTHS, length.get("by_depth", ()), strict=False)}
        for name, share in length.get("by_kind", depths).items():
            found.setdefault(name, []).append(share)
    return {name: statistics.mean(shares) for name, shares in found.items()}


def sources_table(data: Data) -> str:
    lines = []
    for window in windows(data):
        scored = [losses(source_scores(data), kind, window) for kind in KINDS]
        shown = [f"{found['loss']:.3f} ± {found['loss_error'] or 0:.3f}" if found else "" for found in scored]
        lines.append([f"{int(window):,}", *shown])
    return table(["window", *KINDS], lines) if lines else MISSING


def blocks(data: Data) -> dict[str, str]:
    """The text of every block of the page, from the content of the file of `benchmarks.real`."""
    return {
        "results": results_table(data),
        "sources": sources_table(data),
        "windows": windows_table(data),
        "needles": retrieval_table(data),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=OUTPUT)
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    data = json.loads(arguments.results.read_text(encoding="utf-8"))
    page = arguments.page.read_text(encoding="utf-8") if arguments.page.is_file() else ""
    for name, text in blocks(data).items():
        page = filled(page, name, text)
    arguments.page.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
