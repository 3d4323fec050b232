"""Times against the number of groups as a picture."""

from pathlib import Path

from gqa_convert.measuring.pictures import save_picture
from gqa_convert.measuring.results.kv_heads import mean_heads, order_of
from gqa_convert.measuring.results.schemas import BenchmarkFile, TimedCell


def draw_times(result: BenchmarkFile, path: Path) -> None:
    """A panel for decode time per token with its spread and, where prefill was timed, one for the time per sample; a
    line for each batch and context.

    Args:
        result: of the benchmark.
        path: of the picture; its suffix names the format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [("decode_ms_per_token", "decode time per token (ms)")]
    if all(each.sample_ms is not None for each in result.results):
        panels.append(("sample_ms", f"time per sample of {result.results[0].new_tokens} tokens (ms)"))
    figure = Figure(figsize=(1.0 + 4.4 * len(panels), 4.2), layout="constrained")
    for axes, (key, title) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for label, records in lines(result).items():
            groups = [mean_heads(record.groups) for record in records]
            values = [getattr(record, key) for record in records]
            spread = None
            if key == "decode_ms_per_token":
                low = [middle - record.decode_ms_low for middle, record in zip(values, records, strict=True)]
                high = [record.decode_ms_high - middle for middle, record in zip(values, records, strict=True)]
                spread = (low, high)
            axes.errorbar(groups, values, yerr=spread, marker="o", markersize=4, linewidth=1.2, capsize=2, label=label)
        counts = sorted({mean_heads(record.groups) for record in result.results})
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [f"{count:.3g}" for count in counts])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("groups N (K/V heads per layer)")
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    processor = result.machine.processor if result.machine else None
    figure.suptitle(f"{result.model} ({result.model_type}), {result.dtype}, {processor}", fontsize=9)
    FigureCanvasAgg(figure)
    save_picture(figure, path)


def lines(result: BenchmarkFile) -> dict[str, list[TimedCell]]:
    """The results by the line of the picture that shows them, in order of their groups, of the mean where layers differ."""
    found: dict[str, list[TimedCell]] = {}
    for record in sorted(result.results, key=lambda record: order_of(record.groups)):
        encoder = f", {record.encoder_tokens} of input" if record.encoder_tokens is not None else ""
        found.setdefault(f"batch {record.batch}, {record.context} cached{encoder}", []).append(record)
    return found
