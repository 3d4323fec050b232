"""The errors of an inspection by layer and groups as a picture."""

from pathlib import Path

from gqa_convert.measuring.pictures import save_picture
from gqa_convert.measuring.results.schemas import InspectionFile

_MOST_LABELLED = 48
"""Layers up to which every row has a label and every cell a number."""


def draw_errors(result: InspectionFile, path: Path) -> None:
    """Draw a panel for keys and one for values, with a row per layer and a column per number of groups.

    Args:
        result: of the inspection.
        path: of the picture; its suffix names the format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups, layers = result.groups, result.layers
    figure = Figure(figsize=(3.0 + 1.3 * len(groups), 1.9 + 0.3 * max(3, len(layers))), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    tables = [[[getattr(error, part) for error in layer.errors] for layer in layers] for part in ("keys", "values")]
    highest = max(max(map(max, table)) for table in tables) or 1.0
    for axes, part, table in zip(panels, ("keys", "values"), tables, strict=True):
        image = axes.imshow(table, cmap="Blues", vmin=0.0, vmax=highest, aspect="auto", interpolation="nearest")
        axes.set_title(part, fontsize=11)
        axes.set_xlabel("groups N (K/V heads per layer)")
        axes.set_xticks(range(len(groups)), [str(count) for count in groups])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        for row, numbers in enumerate(table if len(layers) <= _MOST_LABELLED else ()):
            for column, number in enumerate(numbers):
                colour = "white" if number > 0.6 * highest else "black"
                axes.text(column, row, f"{number:.2f}", ha="center", va="center", fontsize=8, color=colour)
    panels[0].set_ylabel("attention layer")
    labels = [layer.label for layer in layers]
    step = max(1, len(layers) // _MOST_LABELLED)
    panels[0].set_yticks(range(0, len(layers), step), labels[::step])
    figure.colorbar(image, ax=list(panels), label="relative error (rms)", fraction=0.05, pad=0.02)
    measured = "on calibration text" if result.calibration else "of the weights alone"
    figure.suptitle(f"What merging {result.kv_heads} K/V heads loses, {measured}", fontsize=11)
    FigureCanvasAgg(figure)
    save_picture(figure, path)
