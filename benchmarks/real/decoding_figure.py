"""The README's figure of decoding: time of a step against K/V heads, for each engine, beside what the bytes allow.

    python -m benchmarks.real.decoding_figure [--times docs/results/real-decoding.json] [--folder docs/results]

Writes `decoding-light.svg` and `decoding-dark.svg`, for light and for dark backgrounds. Needs matplotlib.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.figures import Theme, quiet, save_themes

from .decoding import OUTPUT
from .report import step_times

COLOURS = {"transformers": "blue", "llama.cpp": "purple", "vLLM": "green"}
MARKERS = {"transformers": "o", "llama.cpp": "s", "vLLM": "^"}


def draw(data: dict[str, Any], theme: Theme) -> Figure:
    """One panel per length of the context and size of the batch; heads are merged from left to right."""
    cells = step_times(data)
    figure = Figure(figsize=(11, 3.2), layout="constrained", facecolor="none")
    for axes, cell in zip(figure.subplots(1, len(cells)), cells, strict=True):
        axes.set_title(f"{cell.context:,} tokens, batch {cell.batch}", fontsize=10, color=theme["ink"])
        heads = sorted(cell.cache_bytes, reverse=True)
        floor = [cell.floor_ms[count] for count in heads]
        axes.plot(range(len(heads)), floor, color=theme["ink"], linestyle=":", linewidth=1.2, label="bytes / bandwidth")
        for engine, times in cell.ms.items():
            axes.plot(
                range(len(heads)),
                [times[count] for count in heads],
                color=theme[COLOURS[engine]],
                marker=MARKERS[engine],
                markersize=5,
                linewidth=1.8,
                label=engine,
            )
        labels = [
            f"{count} {'head' if count == 1 else 'heads'}\n{cell.cache_bytes[count] / 1e6:,.0f} MB" for count in heads
        ]
        axes.set_xticks(range(len(heads)), labels, fontsize=7)
        axes.set_xlim(-0.3, len(heads) - 0.7)
        axes.set_ylim(0, None)
        quiet(axes, theme)
    figure.axes[0].set_ylabel("ms per step", color=theme["ink"], fontsize=9)
    figure.supxlabel("K/V heads, and bytes of the K/V cache", color=theme["ink"], fontsize=9)
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(),
        frameon=False,
        labelcolor=theme["ink"],
        fontsize=8,
        loc="outside upper center",
        ncols=len(COLOURS) + 1,
    )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=Path, default=OUTPUT)
    parser.add_argument("--folder", type=Path, default=Path("docs/results"))
    arguments = parser.parse_args()
    data = json.loads(arguments.times.read_text(encoding="utf-8"))
    save_themes(partial(draw, data), arguments.folder, "decoding")


if __name__ == "__main__":
    main()
