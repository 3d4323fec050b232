"""The README's plot: held-out loss against the K/V cache of a token, for the source and what
`convert` makes of it.

    python -m benchmarks.real.readme_plot [FOLDER]

Writes `real-loss-light.svg` and `real-loss-dark.svg`, for light and for dark backgrounds. Needs
matplotlib.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

RESULTS = Path("docs/results")
BYTES_PER_HEAD = 2 * 30 * 64 * 2
"""Keys and values of 30 layers with a head_dim of 64, in bfloat16."""
METHODS = {
    "mean": "mean pooling",
    "default": "convert without text",
    "fit": "convert --calibration (fit)",
}
THEMES = {
    "light": {
        "ink": "#1f2328",
        "grid": "#d1d9e0",
        "mean": "#cf222e",
        "default": "#bf8700",
        "fit": "#0969da",
    },
    "dark": {
        "ink": "#f0f6fc",
        "grid": "#3d444d",
        "mean": "#ff7b72",
        "default": "#d29922",
        "fit": "#58a6ff",
    },
}


def draw(data: dict[str, Any], colours: dict[str, str]) -> Figure:
    """One panel per kind of text, with losses in windows of 512 tokens; the cache shrinks from
    left to right.
    """
    cells = [cell for cell in data["cells"] if cell["model"] == "smollm2"]
    caches = [3 * BYTES_PER_HEAD, BYTES_PER_HEAD]
    figure = Figure(figsize=(9, 3.2), layout="constrained", facecolor="none")
    for kind, axes in zip(
        ("prose", "code", "chat"), figure.subplots(1, 3, sharey=True), strict=True
    ):
        source = data["models"]["smollm2"]["scores"]["loss"][kind]["512"]["loss"]
        for method, label in METHODS.items():
            seeds = [
                cell["loss"][kind]["512"]["loss"] for cell in cells if cell["method"] == method
            ]
            loss = statistics.mean(seeds)
            axes.plot(
                caches,
                [source, loss],
                marker="o",
                linewidth=1.8,
                color=colours[method],
                label=label,
            )
            axes.annotate(f"{loss:.2f}", (caches[1], loss), (6, 2), textcoords="offset points")
        axes.axhline(source, color=colours["ink"], linestyle=":", linewidth=1.2, label="source")
        axes.set_title(f"{kind} (source {source:.2f})")
        axes.set_xticks(caches, [f"3 heads\n{caches[0]:,} B", f"1 head\n{caches[1]:,} B"])
        axes.set(xlim=(26_000, 3_000), ylim=(0, 11), facecolor="none")
        axes.grid(linewidth=0.6)
    figure.axes[0].set_ylabel("held-out loss, nats per token")
    figure.axes[0].legend(frameon=False, loc="upper left")
    figure.supxlabel("K/V-cache bytes per token")
    return figure


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    measured = json.loads((RESULTS / "real.json").read_text(encoding="utf-8"))
    for theme, colours in THEMES.items():
        style = dict.fromkeys(
            ("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), colours["ink"]
        )
        style |= dict.fromkeys(("grid.color", "axes.edgecolor"), colours["grid"])
        with mpl.rc_context(
            style | {"font.size": 8, "svg.hashsalt": "gqa", "svg.fonttype": "none"}
        ):
            drawn = draw(measured, colours)
            drawn.savefig(
                folder / f"real-loss-{theme}.svg", metadata={"Date": None}, transparent=True
            )
