"""Tables and curves of docs/quality.md from the measurements.

    python -m benchmarks.quality.report [--page docs/quality.md]

What lies between `<!-- begin NAME -->` and `<!-- end NAME -->` is written anew, the rest of the page stays as it is; a
page that lacks a block gets it at its end. The curves are SVG files beside the measurements, and need matplotlib.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.pages import filled, table
from benchmarks.records import Cell

from .curves import CONTROL
from .curves import OUTPUT as CURVES
from .measure import CALIBRATED, DATA_FREE
from .measure import OUTPUT as LOSSES
from .models import MODELS, groups_of, heads_of

METHODS = [(method, False) for method in DATA_FREE] + [(method, True) for method in CALIBRATED]
NAMES = {
    "demo": "bundled (Llama-style)",
    "qwen2": "Qwen2-style",
    "gpt2": "GPT-2-style",
    "t5": "T5 1.1-style",
}
STARTS = {"mean": "mean", "fit": "fit", CONTROL: "source (control)"}
LOSS_NAMES = {"lm": "language model", "kl": "KL to the source"}
COLOURS = {"mean": "tab:red", "fit": "tab:blue", CONTROL: "tab:gray"}
STYLES = {"lm": "--", "kl": "-"}
Series = dict[tuple[str, str], dict[float, Cell]]


def models_table(data: dict[str, Any]) -> str:
    rows = [
        [
            NAMES[name],
            str(heads_of(name)),
            f"{known['parameters']:,}",
            f"{known['training_tokens']:,}",
            f"{known['loss']:.3f}",
        ]
        for name in MODELS
        if "loss" in (known := data["models"].get(name, {}))
    ]
    return table(["model", "K/V heads", "parameters", "training tokens", "loss"], rows)


def method_tables(data: dict[str, Any]) -> str:
    """For each model a table of losses, with the share of mean pooling's gap that is closed; over seeds, the mean and
    the range.
    """
    parts = []
    for name in (name for name in MODELS if any(cell["model"] == name for cell in data["cells"])):
        groups = groups_of(name)
        rows = []
        for method, calibrated in METHODS:
            found = [_cells(data, name, count, method, calibrated) for count in groups]
            if any(found):
                label = f"{method}, calibrated" if calibrated and method in DATA_FREE else method
                rows.append([label, *(_shown(cells) for cells in found)])
        known = data["models"][name]
        header = ["method", *(f"{heads_of(name)} -> {count}" for count in groups)]
        parts.append(f"{NAMES[name]}; the source has {known['loss']:.3f}:\n\n{table(header, rows)}")
    return "\n\n".join(parts)


def _cells(data: dict[str, Any], name: str, groups: int, method: str, calibrated: bool) -> list[Cell]:
    wanted = (name, groups, method, calibrated)
    found = [
        cell
        for cell in data["cells"]
        if (cell["model"], cell["groups"], cell["method"], bool(cell["calibration_tokens"])) == wanted
    ]
    most = max((cell["calibration_tokens"] or 0 for cell in found), default=0)
    return [cell for cell in found if (cell["calibration_tokens"] or 0) == most]


def _shown(cells: list[Cell]) -> str:
    if not cells:
        return ""
    losses = [cell["loss"] for cell in cells]
    text = f"{statistics.mean(losses):.3f}"
    if len(losses) > 1:
        text += f" ({min(losses):.3f} to {max(losses):.3f})"
    shares = [cell["gap_closed"] for cell in cells if "gap_closed" in cell and cell["method"] != "mean"]
    return text + (f", {100 * statistics.mean(shares):.1f}%" if shares else "")


def series_of(data: dict[str, Any], name: str) -> Series:
    """Each curve's points by share of tokens: the best learning rate at each."""
    cells = [cell for cell in data["cells"] if cell["model"] == name]
    found: Series = {}
    for start in STARTS:
        for loss in LOSS_NAMES:
            points = [cell for cell in cells if cell["start"] == start and cell["loss_kind"] == loss]
            best = {
                alpha: min((cell for cell in points if cell["alpha"] == alpha), key=_loss)
                for alpha in {cell["alpha"] for cell in points}
            }
            zero = next((cell for cell in cells if cell["start"] == start and not cell["alpha"]), None)
            if best:
                found[start, loss] = ({0.0: zero} if zero else {}) | dict(sorted(best.items()))
    return found


def _loss(cell: Cell) -> float:
    return float(cell["loss"])


def curve_tables(data: dict[str, Any], pictures: Path, page: Path) -> str:
    parts = []
    for name in (name for name in MODELS if any(cell["model"] == name for cell in data["cells"])):
        series = series_of(data, name)
        alphas = sorted({alpha for points in series.values() for alpha in points})
        rows = [
            [f"{STARTS[start]}, {LOSS_NAMES[loss]}", *(_point(points.get(alpha)) for alpha in alphas)]
            for (start, loss), points in series.items()
        ]
        groups = groups_of(name)
        text = f"{NAMES[name]}, {heads_of(name)} -> {groups[1]}; the source has {data['models'][name]['loss']:.3f}:\n\n"
        text += table(["start, loss", *(f"{100 * alpha:g}%" for alpha in alphas)], rows)
        picture = pictures / f"uptraining-quality-{name}.svg"
        if draw(
            series, data["models"][name]["loss"], f"{NAMES[name]}, {heads_of(name)} -> {groups[1]} K/V heads", picture
        ):
            text += f"\n\n![Held-out loss against the share of the training tokens]({Path(os.path.relpath(picture, page.parent)).as_posix()})"
        parts.append(text)
    return "\n\n".join(parts)


def _point(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return f"{cell['loss']:.3f}" + (f" ({cell['learning_rate']:g})" if cell["learning_rate"] else "")


def draw(series: Series, source: float, title: str, path: Path) -> bool:
    """The curves as an SVG file, the same bytes for the same numbers; whether matplotlib was there."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        return False
    with mpl.rc_context({"svg.hashsalt": "quality", "svg.fonttype": "none"}):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for (start, loss), points in series.items():
            losses = [cell["loss"] for cell in points.values()]
            label = f"{STARTS[start]}, {LOSS_NAMES[loss]}"
            axes.plot(
                [100 * alpha for alpha in points],
                losses,
                STYLES[loss],
                marker="o",
                markersize=4,
                color=COLOURS[start],
                label=label,
            )
        axes.axhline(source, color="black", linewidth=0.8, linestyle=":", label="source")
        axes.set_xscale("symlog", linthresh=0.5)
        ticks = sorted({100 * alpha for points in series.values() for alpha in points})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("uptraining, % of the training tokens")
        axes.set_ylabel("held-out loss, nats per token")
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", type=Path, default=LOSSES)
    parser.add_argument("--curves", type=Path, default=CURVES)
    parser.add_argument("--page", type=Path, default=Path("docs/quality.md"))
    arguments = parser.parse_args()
    blocks: list[tuple[str, Path, Callable[[dict[str, Any]], str]]] = [
        ("models", arguments.losses, models_table),
        ("methods", arguments.losses, method_tables),
        ("uptraining", arguments.curves, lambda data: curve_tables(data, arguments.curves.parent, arguments.page)),
    ]
    page = arguments.page.read_text(encoding="utf-8") if arguments.page.is_file() else ""
    for name, path, make in blocks:
        if path.is_file():
            page = filled(page, name, make(json.loads(path.read_text(encoding="utf-8"))))
        else:
            sys.stderr.write(f"no {path}: the block {name!r} stays as it is\n")
    arguments.page.parent.mkdir(parents=True, exist_ok=True)
    arguments.page.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
