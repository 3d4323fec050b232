"""Fitted errors by layer and groups as a picture."""

import io
from pathlib import Path
from typing import Any

from gqa_convert.errors import MissingExtraError, OptionError, OutputError
from gqa_convert.measuring.results.schemas import InspectionFile

FORMATS = (".png", ".svg", ".pdf")
_DRAWN_BY = "drawn by gqa-convert"
_WRITTEN = 48
"""Up to so many layers, numbers are written into the cells."""


def check_picture(path: Path) -> None:
    """Refuse a picture that could not be drawn, before the long work.

    Raises:
        OptionError: the file's name or folder won't do.
        OutputError: there is such a file already, and this program did not draw it.
        MissingExtraError: matplotlib is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise OptionError(
            f"--plot {path} ends in {path.suffix or 'nothing'!r}: name a file that ends in one of {', '.join(FORMATS)}"
        )
    if not path.parent.is_dir():
        raise OptionError(f"--plot {path}: there is no folder {path.parent}, make it first")
    if path.exists() and not is_our_picture(path):
        raise OutputError(f"--plot {path} exists and gqa-convert did not draw it: name another file")
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            "matplotlib is not installed, which --plot needs: pip install 'gqa-convert[plot]'"
        ) from None


def is_our_picture(path: Path) -> bool:
    """Whether `save_picture` wrote a file."""
    try:
        return _DRAWN_BY.encode() in path.read_bytes()
    except OSError:
        return False


def save_picture(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib in the format that the file's name says, marked as drawn by this program."""
    kind = path.suffix[1:].lower()
    picture = io.BytesIO()
    figure.savefig(picture, format=kind, dpi=150, metadata={"Software" if kind == "png" else "Creator": _DRAWN_BY})
    path.write_bytes(picture.getvalue())


def draw_errors(result: InspectionFile, path: Path) -> None:
    """A panel for keys and one for values: a row per layer, a column per number of groups, darker where more is lost.

    Args:
        result: of `inspect_checkpoint`.
        path: of the file, whose ending says the format.
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
        for row, numbers in enumerate(table if len(layers) <= _WRITTEN else ()):
            for column, number in enumerate(numbers):
                colour = "white" if number > 0.6 * highest else "black"
                axes.text(column, row, f"{number:.2f}", ha="center", va="center", fontsize=8, color=colour)
    panels[0].set_ylabel("attention layer")
    labels = [layer.label for layer in layers]
    step = max(1, len(layers) // _WRITTEN)
    panels[0].set_yticks(range(0, len(layers), step), labels[::step])
    figure.colorbar(image, ax=list(panels), label="relative error (rms)", fraction=0.05, pad=0.02)
    measured = "on calibration text" if result.calibration else "of the weights alone"
    figure.suptitle(f"What merging {result.kv_heads} K/V heads loses, {measured}", fontsize=11)
    FigureCanvasAgg(figure)
    save_picture(figure, path)
