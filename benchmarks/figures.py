"""What the README's figures have in common: ink for light and for dark backgrounds, quiet axes, files that do not change by themselves."""

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
