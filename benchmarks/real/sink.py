"""How long hidden states are behind each layer, in a source and in its results: at the first
position, where some models have a massive state, the attention sink, and on average at all others.

    python -m benchmarks.real.sink --data TEXT.jsonl --output docs/results/sink.json SOURCE RESULT
    [RESULT ...] python -m benchmarks.real.sink --plot docs/results/sink.svg --output
    docs/results/sink.json

The output keeps what other commands measured, so that models come one after the other.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks.records import Records
from gqa_convert.conversion.calibration.streams import Request
from gqa_convert.conversion.calibration.text import draw_text
from gqa_convert.conversion.calibration.texts import open_text
from gqa_convert.families.loading import load_model

BLOCKS = 8
LENGTH = 1024


def lengths(model: Any, blocks: torch.Tensor) -> dict[str, list[float]]:
    """Average lengths behind each decoder layer: of the states at the `first` positions, and of
    all `others`.
    """
    first: list[float] = []
    others: list[float] = []

    def note(_: Any, __: Any, output: Any) -> None:
        states = output if isinstance(output, torch.Tensor) else output[0]
        norms = states.float().norm(dim=-1)
        first.append(float(norms[:, 0].mean()))
        others.append(float(norms[:, 1:].mean()))

    hooks = [layer.register_forward_hook(note) for layer in model.get_decoder().layers]
    with torch.inference_mode():
        model(input_ids=blocks)
    for hook in hooks:
        hook.remove()
    return {"first": first, "others": others}


def draw(sources: dict[str, dict[str, Any]], out: Path) -> None:
    """For each source how long its states are by layer, and the first position's in its results,
    as a share of that.
    """
    figure = Figure(figsize=(9, 3.2 * len(sources)), layout="constrained", facecolor="white")
    for (name, models), (left, right) in zip(
        sources.items(), figure.subplots(len(sources), 2, squeeze=False), strict=True
    ):
        source = models.pop(name)
        layers = range(1, 1 + len(source["first"]))
        left.plot(layers, source["first"], marker=".", label="first position")
        left.plot(layers, source["others"], marker=".", label="other positions")
        left.set(title=name, xlabel="layer", ylabel="length of the hidden state", yscale="log")
        for model, measured in models.items():
            shares = [
                ours / theirs
                for ours, theirs in zip(measured["first"], source["first"], strict=True)
            ]
            right.plot(layers, shares, marker=".", label=model)
        right.axhline(1, color="grey", linewidth=1)
        right.set(
            title="first position after conversion",
            xlabel="layer",
            ylabel="share of the source's length",
        )
        for axes in (left, right):
            axes.legend(frameon=False)
            axes.grid(linewidth=0.4)
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", type=Path, help="checkpoints, the source first")
    parser.add_argument("--data", type=Path, help="held-out text")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--plot", type=Path, help="SVG file of what the output has")
    options = parser.parse_args()
    if options.models:
        records = Records(options.output, ("source", "model"), "benchmarks.real.sink")
        source = options.models[0]
        request = Request(source, BLOCKS * LENGTH, length=LENGTH)
        text = draw_text(request, [open_text(options.data)])
        blocks = torch.cat([batch["input_ids"] for batch in text.batches])
        for folder in options.models:
            model, _ = load_model(folder, torch.float32)
            records.cell(source=source.name, model=folder.name).update(
                lengths(model.eval(), blocks)
            )
            records.write()
    if options.plot:
        cells = json.loads(options.output.read_text(encoding="utf-8"))["cells"]
        sources: dict[str, dict[str, Any]] = {}
        for cell in cells:
            sources.setdefault(cell["source"], {})[cell["model"]] = cell
        draw(sources, options.plot)


if __name__ == "__main__":
    main()
