"""Decode times against the number of K/V heads as a picture."""

from pathlib import Path

from gqa_convert.measuring.pictures import save_picture
from gqa_convert.measuring.results import BenchmarkFile, TimedCell


def draw_times(result: BenchmarkFile, path: Path) -> None:
    """Draw the decode time per token, a line for each batch and context.

    Args:
        result: of the benchmark.
        path: of the picture; its suffix names the format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines: dict[str, list[TimedCell]] = {}
    for cell in result.results:
        lines.setdefault(f"batch {cell.batch}, {cell.context} cached", []).append(cell)
    figure = Figure(figsize=(5.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for label, cells in lines.items():
        times = [cell.decode_ms_per_token or 0.0 for cell in cells]
        axes.plot([str(cell.groups) for cell in cells], times, marker="o", markersize=4, label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("K/V heads per layer")
    axes.set_title("decode time per token (ms)", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    figure.suptitle(f"{result.model} ({result.model_type}), {result.dtype}, {result.machine.processor}", fontsize=9)
    save_picture(figure, path)
