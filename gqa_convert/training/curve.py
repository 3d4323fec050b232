"""Draws the loss curve of a run."""

import io
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gqa_convert.training.metrics import LM_LOSS, MetricsLine

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_curve(lines: Sequence[MetricsLine], evaluations: dict[str, float]) -> bytes | None:
    """Draw the training objective and the held-out loss over tokens as a PNG file; None if matplotlib is not installed.

    Args:
        lines: the lines of the metrics file.
        evaluations: losses at the `start` and of the `source`, if they were measured.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        return None
    picture = io.BytesIO()
    FigureCanvasAgg(loss_figure(lines, evaluations)).print_png(picture)
    return picture.getvalue()


def loss_figure(lines: Sequence[MetricsLine], evaluations: dict[str, float]) -> "Figure":
    """Return the figure: one plot where the objective is the language-model loss too, and else one for each quantity."""
    from matplotlib.figure import Figure

    trained = [(line.tokens, line.loss) for line in lines if line.loss is not None]
    objective = next((line.objective for line in lines if line.loss is not None), LM_LOSS)
    held_out = [(line.tokens, line.evaluation_loss) for line in lines if line.evaluation_loss is not None]
    if "start" in evaluations:
        held_out.insert(0, (0, evaluations["start"]))
    apart = bool(trained and held_out) and objective != LM_LOSS
    figure = Figure(figsize=(7, 6 if apart else 4), layout="constrained")
    rows = list(figure.subplots(2 if apart else 1, 1, sharex=True, squeeze=False)[:, 0])
    above, below = rows[0], rows[-1]
    if trained:
        style = {"color": "tab:blue", "alpha": 0.5, "linewidth": 1}
        above.plot(*zip(*trained, strict=True), **style, label=f"{objective} on the training text")
        above.set_ylabel(textwrap.fill(f"{objective}, nats per token", 32))
    if held_out:
        style = {"color": "tab:orange", "marker": "o", "markersize": 3}
        below.plot(*zip(*held_out, strict=True), **style, label=f"{LM_LOSS} on held-out text")
    if "source" in evaluations:
        below.axhline(
            evaluations["source"], color="gray", linestyle="--", linewidth=1, label=f"{LM_LOSS} of the source"
        )
    if held_out or "source" in evaluations:
        below.set_ylabel(f"{LM_LOSS},\nnats per token")
    for axes in rows:
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    below.set_xlabel("tokens of training text")
    return figure
