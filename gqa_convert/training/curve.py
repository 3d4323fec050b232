"""Draws the loss curve of a run."""

import io
from collections.abc import Sequence

from gqa_convert.training.metrics import MetricsLine


def draw_curve(lines: Sequence[MetricsLine], evaluations: dict[str, float]) -> bytes | None:
    """Draw training and evaluation losses over tokens as a PNG file; returns None if matplotlib is not installed.

    Args:
        lines: the lines of the metrics file.
        evaluations: losses at the `start` and of the `source`, if they were measured.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    measured = [(line.tokens, line.loss) for line in lines if line.loss is not None]
    if measured:
        axes.plot(*zip(*measured, strict=True), color="tab:blue", alpha=0.5, linewidth=1, label="training loss")
    held_out = [(line.tokens, line.evaluation_loss) for line in lines if line.evaluation_loss is not None]
    if "start" in evaluations:
        held_out.insert(0, (0, evaluations["start"]))
    if held_out:
        axes.plot(*zip(*held_out, strict=True), color="tab:orange", marker="o", markersize=3, label="evaluation loss")
    if "source" in evaluations:
        axes.axhline(evaluations["source"], color="gray", linestyle="--", linewidth=1, label="source")
    axes.set_xlabel("tokens")
    axes.set_ylabel("nats per token")
    if measured or held_out:
        axes.legend()
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    return picture.getvalue()
