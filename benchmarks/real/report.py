"""Tables of docs/results/README.md from the measurements.

    python -m benchmarks.real.report

What lies between `<!-- begin NAME -->` and `<!-- end NAME -->` is written anew; the rest of the
page stays.
"""

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.pages import filled, table
from benchmarks.records import Cell

from .__main__ import METHODS, OUTPUT
from .text import KINDS

PAGE = Path("docs/results/README.md")
Data = dict[str, Any]
Rows = dict[str, list[Cell]]


def rows(data: Data, model: str) -> Rows:
    """The cells of all seeds by method, in the order of methods, with the calibration text
    beside it.
    """
    found: Rows = {}
    for method in METHODS:
        for cell in data["cells"]:
            if (cell["model"], cell["method"]) == (model, method):
                text = cell.get("calibration")
                found.setdefault(f"{method}, {text}" if text else method, []).append(cell)
    return found


def values(cells: list[Cell], kind: str, window: str, name: str) -> list[float]:
    """A score of each cell that has it."""
    found = [cell.get("loss", {}).get(kind, {}).get(window) for cell in cells]
    return [each[name] for each in found if each is not None]


def with_error(cells: list[Cell], kind: str, window: str, name: str) -> str:
    """The mean over seeds and its standard error, with the range of several seeds."""
    each = values(cells, kind, window, name)
    if not each:
        return ""
    error = statistics.mean(values(cells, kind, window, f"{name}_error"))
    spread = f" ({min(each):.3f} to {max(each):.3f})" if len(each) > 1 else ""
    return f"{statistics.mean(each):.3f} ± {error:.3f}{spread}"


def windows(source: Cell) -> list[str]:
    """The window lengths of the source's scores, ascending."""
    return sorted({window for each in source["loss"].values() for window in each}, key=int)


def results_table(source: Cell, found: Rows) -> str:
    """One row per method, in windows of 512 tokens."""
    lines = []
    for method, cells in found.items():
        minutes = sorted({f"{cell['minutes']:.1f}" for cell in cells}, key=float)
        line = [method, " to ".join(dict.fromkeys([minutes[0], minutes[-1]]))]
        line += [loss_and_gap(source, cells, found.get("mean"), kind) for kind in KINDS]
        line += [with_error(cells, kind, "512", "kl") for kind in KINDS]
        lines.append([*line, found_and_recovery(source, cells)])
    header = [
        "method",
        "minutes",
        *(f"loss, {kind}" for kind in KINDS),
        *(f"KL, {kind}" for kind in KINDS),
        "found",
    ]
    return f"Windows of 512 tokens:\n\n{table(header, lines)}"


def loss_and_gap(source: Cell, cells: list[Cell], pooled: list[Cell] | None, kind: str) -> str:
    """The source's loss, the mean over seeds, and the share of mean pooling's gap that is
    closed.
    """
    (before,) = values([source], kind, "512", "loss")
    text = f"{before:.3f} -> {statistics.mean(values(cells, kind, '512', 'loss')):.3f}"
    if pooled is None or cells is pooled:
        return text
    added, gap = (statistics.mean(values(each, kind, "512", "excess")) for each in (cells, pooled))
    return f"{text}, {100 * (1 - added / gap):.1f}%"


def found_and_recovery(source: Cell, cells: list[Cell]) -> str:
    """The shares of facts that source and result find over all lengths and seeds, and the second
    over the first.
    """
    before, after = (
        [length["found"] for cell in each for length in cell.get("retrieval", {}).values()]
        for each in ([source], cells)
    )
    if not before or not after:
        return ""
    recovered = statistics.mean(after) / statistics.mean(before)
    return (
        f"{100 * statistics.mean(before):.0f}% -> {100 * statistics.mean(after):.0f}%, recovery "
        f"{100 * recovered:.0f}%"
    )


def windows_table(source: Cell, found: Rows) -> str:
    """The KL of the methods that were measured at several window lengths."""
    known = windows(source)
    lines = []
    for method, cells in found.items():
        for kind in KINDS:
            divergences = [with_error(cells, kind, window, "kl") for window in known]
            if sum(map(bool, divergences)) > 1:
                lines.append([method, kind, *divergences])
    return table(["method", "text", *(f"KL, {each}" for each in known)], lines)


def retrieval_table(source: Cell, found: Rows) -> str:
    """Shares found by length, and by kind of question over all lengths."""
    measured = {"source": [source], **found}
    lengths = {
        method: [each for cell in cells for each in cell.get("retrieval", {}).items()]
        for method, cells in measured.items()
    }
    known = sorted({length for each in lengths.values() for length, _ in each}, key=int)
    kinds = list(
        dict.fromkeys(
            kind for each in lengths.values() for _, cell in each for kind in cell["by_kind"]
        )
    )
    lines = []
    for method, each in lengths.items():
        if each:
            shares = [
                [cell["found"] for length, cell in each if length == wanted] for wanted in known
            ]
            shares += [[cell["by_kind"][kind] for _, cell in each] for kind in kinds]
            lines.append([method, *(f"{100 * statistics.mean(share):.0f}%" for share in shares)])
    return table(["method", *(f"{int(length):,} tokens" for length in known), *kinds], lines)


def sources_table(source: Cell) -> str:
    lines = [
        [f"{int(window):,}", *(with_error([source], kind, window, "loss") for kind in KINDS)]
        for window in windows(source)
    ]
    return table(["window", *KINDS], lines)


def blocks(data: Data) -> dict[str, str]:
    """The text of every block of the page, from the content of the file of `benchmarks.real`."""
    made: dict[str, str] = {}
    for model, measured in data["models"].items():
        source, found = measured["scores"], rows(data, model)
        made |= {
            f"{model} results": results_table(source, found),
            f"{model} sources": sources_table(source),
            f"{model} windows": windows_table(source, found),
            f"{model} retrieval": retrieval_table(source, found),
        }
    return made


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    for name, text in blocks(json.loads(OUTPUT.read_text(encoding="utf-8"))).items():
        if f"<!-- begin {name} -->" in page:
            page = filled(page, name, text)
    PAGE.write_text(page, encoding="utf-8")
