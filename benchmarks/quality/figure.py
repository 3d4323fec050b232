"""The README's figure: held-out loss against the K/V cache of a token, for the source, mean pooling and `fit`.

    python -m benchmarks.quality.figure [--losses docs/results/quality.json] [--folder docs/results]

Writes `loss-against-cache-light.svg` and `loss-against-cache-dark.svg`, for light and for dark backgrounds. Needs matplotlib.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from .measure import OUTPUT as LOSSES
from .models import DEMO, MODELS, SPECS, groups_of, heads_of, quality_tokenizer

NAMES = {"demo": "Llama-style", "qwen2": "Qwen2-style", "gpt2": "GPT-2-style", "t5": "T5-style"}
BYTES_PER_NUMBER = 2
"""The cache is counted in bfloat16."""
DEMO_CONFIG = Path(__file__).parents[2] / "gqa_convert" / "demo_checkpoint" / "config.json"
Theme = dict[str, str]
THEMES: dict[str, Theme] = {
    "light": {
        "ink": "#1f2328",
        "grid": "#d1d9e0",
        "red": "#cf222e",
        "blue": "#0969da",
        "green": "#1a7f37",
        "purple": "#8250df",
    },
    "dark": {
        "ink": "#f0f6fc",
        "grid": "#3d444d",
        "red": "#ff7b72",
        "blue": "#58a6ff",
        "green": "#3fb950",
        "purple": "#bc8cff",
    },
}
COLOURS = {"mean": "red", "fit": "blue"}


def cache_bytes(name: str, kv_heads: int) -> int:
    """Bytes of keys and values that decoder self-attention caches for one token."""
    if name == DEMO:
        config = json.loads(DEMO_CONFIG.read_text(encoding="utf-8"))
    else:
        config = SPECS[name].build(quality_tokenizer(name)).config.to_dict()
    layers = next(config[key] for key in ("num_decoder_layers", "n_layer", "num_hidden_layers") if config.get(key))
    head_dim = config.get("head_dim") or config.get("d_kv") or config["n_embd"] // config["n_head"]
    return int(2 * layers * kv_heads * head_dim * BYTES_PER_NUMBER)


def loss(data: dict[str, Any], name: str, kv_heads: int, method: str) -> float:
    """Nats per token after conversion, averaged over seeds."""
    wanted = (name, kv_heads, method)
    losses = [cell["loss"] for cell in data["cells"] if (cell["model"], cell["groups"], cell["method"]) == wanted]
    return float(statistics.mean(losses))


def quiet(axes: Axes, theme: Theme) -> None:
    """Give a panel a thin grid and small labels, on the page's own background."""
    axes.set_facecolor("none")
    axes.grid(color=theme["grid"], linewidth=0.6)
    axes.tick_params(colors=theme["ink"], labelsize=7)
    for spine in axes.spines.values():
        spine.set_color(theme["grid"])


def save_themes(draw: Callable[[Theme], Figure], folder: Path, name: str) -> None:
    """Write `NAME-light.svg` and `NAME-dark.svg`.

    Args:
        draw: makes the figure in the colours of a theme.
        folder: where they go; it is made if it is missing.
        name: of the figure.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for theme, colours in THEMES.items():
        with mpl.rc_context({"svg.hashsalt": "first screen", "svg.fonttype": "none", "font.family": "sans-serif"}):
            draw(colours).savefig(folder / f"{name}-{theme}.svg", metadata={"Date": None}, transparent=True)


def draw(data: dict[str, Any], bytes_of: dict[str, dict[int, int]], theme: Theme) -> Figure:
    """One panel per model; the cache shrinks from left to right."""
    figure = Figure(figsize=(11, 3.2), layout="constrained", facecolor="none")
    for axes, name in zip(figure.subplots(1, len(MODELS)), MODELS, strict=True):
        source = data["models"][name]["loss"]
        counts = (heads_of(name), *groups_of(name))
        positions = [bytes_of[name][count] for count in counts]
        axes.axhline(source, color=theme["ink"], linestyle=":", linewidth=1.2, label="source")
        for method, marker in (("mean", "o"), ("fit", "s")):
            losses = [source, *(loss(data, name, count, method) for count in counts[1:])]
            label = {"mean": "mean pooling", "fit": "fit"}[method]
            colour = theme[COLOURS[method]]
            axes.plot(positions, losses, color=colour, marker=marker, markersize=5, linewidth=1.8, label=label)
        axes.set_xscale("log")
        axes.invert_xaxis()
        axes.xaxis.set_major_locator(FixedLocator(positions))
        axes.xaxis.set_minor_locator(NullLocator())
        labels = [
            f"{count} {'head' if count == 1 else 'heads'}\n{size:,} B"
            for count, size in zip(counts, positions, strict=True)
        ]
        axes.set_xticklabels(labels, fontsize=7)
        axes.set_title(NAMES[name], fontsize=10, color=theme["ink"])
        quiet(axes, theme)
    figure.axes[0].set_ylabel("held-out loss, nats per token", color=theme["ink"], fontsize=9)
    figure.supxlabel("K/V heads, and K/V-cache bytes per token", color=theme["ink"], fontsize=9)
    figure.axes[0].legend(frameon=False, labelcolor=theme["ink"], fontsize=8, loc="upper left")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", type=Path, default=LOSSES)
    parser.add_argument("--folder", type=Path, default=Path("docs/results"))
    arguments = parser.parse_args()
    data = json.loads(arguments.losses.read_text(encoding="utf-8"))
    bytes_of = {
        name: {count: cache_bytes(name, count) for count in (heads_of(name), *groups_of(name))} for name in MODELS
    }
    save_themes(partial(draw, data, bytes_of), arguments.folder, "loss-against-cache")


if __name__ == "__main__":
    main()
