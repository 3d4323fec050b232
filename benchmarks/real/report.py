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


def blocks(data: Data) -> dict[str, str]:
    """The text of every block of the page, from the content of the file of `benchmarks.real`."""
    made: dict[str, str] = {}
    for model, measured in data["models"].items():
        source, found = measured["scores"], rows(data, model)
        made[f"{model} results"] = results_table(source, found)
    return made


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    for name, text in blocks(json.loads(OUTPUT.read_text(encoding="utf-8"))).items():
        if f"<!-- begin {name} -->" in page:
            page = filled(page, name, text)
    PAGE.write_text(page, encoding="utf-8")
