"""Draws the demo's results."""

from collections.abc import Sequence
from pathlib import Path

from gqa_convert.measuring.pictures import save_picture
from gqa_convert.measuring.results.schemas import DemoConversion, DemoUptraining


def draw(results: Sequence[DemoConversion], uptraining: DemoUptraining | None, path: Path) -> str | None:
    """Draw the loss and the K/V-cache size over N, and the loss during uptraining.

    Args:
        results: the conversions by mean pooling, with those by fitting.
        uptraining: the uptraining; None if it was skipped.
        path: the path of the picture.

    Returns:
        The path; None without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator
    except ImportError:
        return None
    groups = [result.groups for result in results]
    figure = Figure(figsize=(12 if uptraining else 8, 3.4), layout="constrained")
    left, middle, *right = figure.subplots(1, 3 if uptraining else 2)
    left.plot(groups, [result.loss for result in results], marker="o", color="tab:red", label="mean pooling")
    left.plot(
        groups,
        [(result.fit or result).loss for result in results],
        marker="o",
        color="tab:blue",
        label="fit on calibration text",
    )
    left.set_ylabel("held-out loss, nats per token")
    left.set_title("Loss before uptraining", fontsize=10)
    left.legend()
    middle.plot(groups, [result.kv_bytes_per_token for result in results], marker="o", color="tab:orange")
    middle.set_ylabel("K/V-cache bytes per token")
    middle.set_ylim(bottom=0)
    middle.set_title("K/V cache", fontsize=10)
    for axes in (left, middle):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("groups N (K/V heads per layer)")
        axes.xaxis.set_major_locator(FixedLocator(groups))
        axes.xaxis.set_major_formatter(FixedFormatter([str(count) for count in groups]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.3)
    for axes in right:
        assert uptraining is not None
        assert uptraining.evaluation is not None
        curve = uptraining.curve
        axes.plot([point.tokens for point in curve], [point.loss for point in curve], marker="o", color="tab:green")
        axes.axhline(uptraining.evaluation.source, color="gray", linestyle="--", label="source")
        axes.set_title(f"Loss during uptraining, N = {uptraining.groups}", fontsize=10)
        axes.set_xlabel("tokens of uptraining")
        axes.set_ylabel("held-out loss, nats per token")
        axes.grid(alpha=0.3)
        axes.legend()
    save_picture(figure, path)
    return str(path)
