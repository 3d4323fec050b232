"""Tables of docs/results/README.md from the measurements.

    python -m benchmarks.quality.report [--page docs/results/README.md]

What lies between `<!-- begin NAME -->` and `<!-- end NAME -->` is written anew, the rest of the page stays as it is; a
page that lacks a block gets it at its end.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.pages import filled, table
from benchmarks.records import Cell

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", type=Path, default=LOSSES)
    parser.add_argument("--page", type=Path, default=Path("docs/results/README.md"))
    arguments = parser.parse_args()
    data = json.loads(arguments.losses.read_text(encoding="utf-8"))
    page = arguments.page.read_text(encoding="utf-8")
    page = filled(page, "models", models_table(data))
    page = filled(page, "methods", method_tables(data))
    arguments.page.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
