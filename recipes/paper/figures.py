"""Figures 3, 4 and 6 of Ainslie et al. 2023 from our own measurements, the paper's numbers beside them where it states
any.

    python recipes/paper/figures.py [--results docs/results] [--out docs/results/paper]

| figure | from |
|---|---|
| 3, quality against time | `quality.json`, and `small-model-time.json` of `gqa-convert benchmark` on the bundled model
| | 4, how heads are pooled | `quality.json` of `python -m benchmarks.quality.measure` | | 6, time against groups |
`paper-time.json` of `python benchmarks/paper_time.py` |

Figure 5, quality against the share of uptraining, is drawn by `python -m benchmarks.quality.report` (docs/quality.md).
Figures whose measurements are missing are named and left out. Needs matplotlib.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

PAPER = {
    "MHA-XXL": (64, 1.51, 47.2),
    "GQA-8-XXL": (8, 0.28, 47.1),
    "MQA-XXL": (1, 0.24, 46.6),
    "MHA-Large": (None, 0.37, 46.0),
}
"""Table 1: K/V heads of T5-XXL, seconds per sample, average quality."""
POOLED = ("mean", "first", "random")
"""What the paper compares."""
NAMES = {"demo": "Llama-style", "qwen2": "Qwen2-style", "gpt2": "GPT-2-style", "t5": "T5-style"}
Json = dict[str, Any]


def canvas(columns: int = 1) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=(5.2 * columns, 3.8), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def losses(quality: Json, model: str, groups: int, method: str) -> float | None:
    """The mean over seeds."""
    found = [
        cell["loss"]
        for cell in quality["cells"]
        if (cell["model"], cell["groups"], cell["method"]) == (model, groups, method)
        and (method == "fit" or cell["calibration_tokens"] is None)
    ]
    return statistics.mean(found) if found else None


def quality_against_time(quality: Json, timed: Json) -> Figure:
    figure, (ours, theirs) = canvas(2)
    times = {record["groups"]: record["decode_ms_per_token"] for record in timed["results"]}
    most = max(times)
    for method, marker in (("mean", "^"), ("fit", "s")):
        known = {n: loss for n in sorted(times) if (loss := losses(quality, "demo", n, method)) is not None}
        ours.plot([times[n] for n in known], list(known.values()), marker=marker, label=f"{method}, nothing trained")
        for n, loss in known.items():
            ours.annotate(f"N = {n}", (times[n], loss), textcoords="offset points", xytext=(5, 5))
    ours.plot(times[most], quality["models"]["demo"]["loss"], "o", color="black", label=f"MHA ({most} heads)")
    first = timed["results"][0]
    ours.set(
        xlabel=f"ms per decoded token (batch {first['batch']}, context {first['context']})",
        ylabel="nats per token",
        title="bundled model",
    )
    ours.legend()
    for name, (_, seconds, average) in PAPER.items():
        theirs.plot(seconds, average, "o")
        theirs.annotate(name, (seconds, average), textcoords="offset points", xytext=(5, 5))
    theirs.set(
        xlabel="seconds per sample",
        ylabel="average quality, 5% uptraining",
        title="the paper, T5 (Table 1)",
        xlim=(0, 1.9),
    )
    return figure


def pooling(quality: Json) -> Figure:
    models = [name for name in NAMES if name in quality["models"]]
    figure, places = canvas(len(models))
    for axes, model in zip(places, models, strict=True):
        groups = sorted({cell["groups"] for cell in quality["cells"] if cell["model"] == model}, reverse=True)
        methods = [*POOLED, "factor", "fit"]
        for number, method in enumerate(methods):
            found = [losses(quality, model, n, method) for n in groups]
            bars = [(place + 0.16 * (number - 2), loss) for place, loss in enumerate(found) if loss is not None]
            if bars:
                axes.bar([place for place, _ in bars], [loss for _, loss in bars], width=0.15, label=method)
        source = quality["models"][model]["loss"]
        axes.axhline(source, color="black", linestyle="--", linewidth=1)
        axes.set(
            xticks=range(len(groups)),
            xticklabels=[f"N = {n}" for n in groups],
            title=NAMES[model],
            ylim=(0.9 * source, None),
        )
    places[0].set_ylabel("nats per token, nothing trained")
    places[-1].legend()
    return figure


def time_against_groups(timed: Json) -> Figure:
    figure, (attention, sample) = canvas(2)
    for batch in dict.fromkeys(record["batch"] for record in timed["results"]):
        records = [record for record in timed["results"] if record["batch"] == batch]
        groups = [record["groups"] for record in records]
        line = attention.plot(
            groups, [record["attention_ms_per_token"] for record in records], marker="o", label=f"batch {batch}"
        )[0]
        attention.plot(
            groups,
            [record["attention_floor_ms_per_token"] for record in records],
            linestyle=":",
            color=line.get_color(),
            label="its bytes at the memory's speed",
        )
        seconds = [512e-3 * record["estimated_decode_ms_per_token"] / batch for record in records]
        sample.plot(groups, [each / seconds[-1] for each in seconds], marker="o", label=f"ours, batch {batch}")
    paper = sorted((groups, seconds) for groups, seconds, _ in PAPER.values() if groups)
    sample.plot(
        [n for n, _ in paper], [seconds / paper[-1][1] for _, seconds in paper], "k^--", label="the paper, eight TPUv4"
    )
    attention.set(
        ylabel=f"attention of a decode step, ms ({timed['layers']} layers)", yscale="log", title="T5-XXL's shape"
    )
    sample.set(ylabel="time per sample, of MHA's", title="512 tokens decoded, all layers (estimated)", ylim=(0, None))
    for axes in (attention, sample):
        axes.set(xlabel="groups N", xscale="log")
        axes.xaxis.set_major_locator(FixedLocator(sorted({record["groups"] for record in timed["results"]})))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.legend()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("docs/results"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/paper"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    mpl.rcParams["svg.hashsalt"] = "gqa-convert"  # the same measurements give the same files
    for name, draw, files in (
        ("figure-3-quality-against-time", quality_against_time, ("quality.json", "small-model-time.json")),
        ("figure-4-pooling", pooling, ("quality.json",)),
        ("figure-6-time-against-groups", time_against_groups, ("paper-time.json",)),
    ):
        paths = [arguments.results / file for file in files]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            sys.stderr.write(f"{name}: left out, {', '.join(missing)} is missing\n")
            continue
        figure = draw(*(json.loads(path.read_text(encoding="utf-8")) for path in paths))
        path = arguments.out / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
