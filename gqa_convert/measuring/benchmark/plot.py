"""Times against the number of groups as a picture."""

from pathlib import Path
from typing import Any

from gqa_convert.measuring.inspect.picture import save_picture


def draw_times(result: dict[str, Any], path: Path) -> None:
    """A panel for decode time per token with its spread and, where prefill was timed, one for the time per sample; a
    line for each batch and context.

    Args:
        result: of `benchmark_model`.
        path: of the file, whose ending says the format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [("decode_ms_per_token", "decode time per token (ms)")]
    if all(each["sample_ms"] is not None for each in result["results"]):
        panels.append(("sample_ms", f"time per sample of {result['results'][0]['new_tokens']} tokens (ms)"))
    figure = Figure(figsize=(1.0 + 4.4 * len(panels), 4.2), layout="constrained")
    for axes, (key, title) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for label, records in lines(result).items():
            groups, values = [record["groups"] for record in records], [record[key] for record in records]
            spread = None
            if key == "decode_ms_per_token":
                low = [record[key] - record["decode_ms_low"] for record in records]
                high = [record["decode_ms_high"] - record[key] for record in records]
                spread = (low, high)
            axes.errorbar(groups, values, yerr=spread, marker="o", markersize=4, linewidth=1.2, capsize=2, label=label)
        counts = sorted({record["groups"] for record in result["results"]})
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("groups N (K/V heads per layer)")
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    some = (
        "" if result["layers"] == result["model_layers"] else f", {result['layers']} of {result['model_layers']} layers"
    )
    figure.suptitle(
        f"{result['model']} ({result['model_type']}{some}), {result['dtype']}, {result['machine']['processor']}",
        fontsize=9,
    )
    FigureCanvasAgg(figure)
    save_picture(figure, path)


def lines(result: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The results by what one line of the picture shows, each line's in order of their groups."""
    found: dict[str, list[dict[str, Any]]] = {}
    for record in sorted(result["results"], key=lambda record: int(record["groups"])):
        encoder = f", {record['encoder_tokens']} of input" if "encoder_tokens" in record else ""
        found.setdefault(f"batch {record['batch']}, {record['context']} cached{encoder}", []).append(record)
    return found
