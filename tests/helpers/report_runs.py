"""Folders with what the commands write: real conversions, and measurements with figures that are easily told apart."""

import json
import shutil
from pathlib import Path
from typing import Any

from gqa_convert.conversion.run import convert_checkpoint
from tests.helpers.checkpoints import write_llama

HEAD = {
    "created": "2026-05-04T03:02:01Z",
    "machine": {
        "device": "cpu",
        "processor": "Example Processor 9",
        "cores": 4,
        "memory_bytes": 16_000_000_000,
        "system": "Linux 6.1",
        "versions": {"torch": "2.13.0"},
    },
}
LOSSES = {12: (2.5, 0.03), 4: (2.75, 0.05), 3: (3.125, 0.0625)}
"""By N: loss and its standard error."""
TIMES = {12: (10.0, 9.5, 10.75), 4: (6.0, 5.5, 6.25), 3: (5.0, 4.75, 5.5), 1: (4.0, 3.5, 4.5)}
"""By N: decode ms, low, high; N = 1 is timed and not evaluated."""
CURVE = ((0, 3.125), (4096, 2.875), (8192, 2.75), (12288, 2.625))
SOURCE_LOSS = 2.5


def write_json(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def evaluation(models: dict[str, tuple[float | None, float | None]], **more: Any) -> dict[str, Any]:
    results = [
        {
            "model": model,
            "loss": loss,
            "loss_standard_error": error,
            "perplexity": None if loss is None else 7.5,
            "bits_per_byte": 1.25,
            "tokens": 4096,
            "bytes": 9000,
            "scored_nan": 0 if loss is not None else 17,
            "difference": {"to": next(iter(models)), "loss": 0.125, "standard_error": 0.0078},
            "kl": 0.0625,
            "kl_standard_error": 0.0039,
            "top1_agreement": 0.875,
            "seconds": 1.0,
        }
        for model, (loss, error) in models.items()
    ]
    command = ["gqa-convert", "evaluate", *models, "--data", "held out.txt", "--json"]
    return {
        "kind": "evaluate",
        **HEAD,
        "command": command,
        "data": "held out.txt",
        "objective": "causal",
        "context": 512,
        "stride": 256,
        "reference": None,
        "results": results,
    } | more


def benchmark(
    times: dict[int, tuple[float, float, float]], contexts: tuple[int, ...] = (512,), **more: Any
) -> dict[str, Any]:
    results = [
        {
            "groups": groups,
            "batch": 2,
            "context": context,
            "decode_ms_per_token": decode,
            "decode_ms_low": low,
            "decode_ms_high": high,
            "decode_tokens_per_second": 2000 / decode,
            "prefill_ms": 30.0,
            "sample_ms": 900.0,
            "new_tokens": 64,
            "kv_bytes_per_token": groups * 256,
            "kv_bytes": groups * 256 * context * 2,
        }
        for context in contexts
        for groups, (decode, low, high) in times.items()
    ]
    return {
        "kind": "benchmark",
        **HEAD,
        "command": ["gqa-convert", "benchmark", "source"],
        "model": "source",
        "model_type": "llama",
        "layers": 2,
        "model_layers": 2,
        "dtype": "float32",
        "heads": 12,
        "weights": "own",
        "attention": "gqa",
        "results": results,
    } | more


def write_uptraining(folder: Path, model: Path) -> None:
    """A finished run of N = 3, without its weights."""
    lines = [
        {"step": step, "tokens": step * 4096, "loss": 0.5} | ({"evaluation_loss": CURVE[step][1]} if step else {})
        for step in range(1, len(CURVE))
    ]
    figures = {"start": CURVE[0][1], "source": SOURCE_LOSS, "final": CURVE[-1][1], "recovered_share": 0.8}
    summary = {
        "kind": "uptrain",
        **HEAD,
        "command": ["gqa-convert", "uptrain", "recipe.yaml", "seed=3"],
        "model": str(folder / "model"),
        "steps": 3,
        "tokens": CURVE[-1][0],
        "alpha": 0.01,
        "evaluation": figures,
        "tokens_per_second": 2000,
    }
    write_json(folder / "summary.json", summary)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "resolved_recipe.yaml").write_text("model: gqa-3\n")
    (folder / "model").mkdir()
    for name in ("config.json", "gqa_conversion.json"):
        shutil.copyfile(model / name, folder / "model" / name)
    path = folder / "model" / "gqa_conversion.json"
    write_json(path, json.loads(path.read_bytes()) | {"uptraining_tokens": CURVE[-1][0]})


def write_runs(folder: Path) -> Path:
    """`runs` with two conversions, an evaluation of them and their source, a benchmark and an uptraining run; `source`
    beside it.
    """
    source, runs = write_llama(folder / "source"), folder / "runs"
    for groups in (3, 4):
        convert_checkpoint(
            source, runs / f"gqa-{groups}", groups, method="mean", command=["gqa-convert", "convert", str(groups)]
        )
    models = {groups: str(source) if groups == 12 else f"gqa-{groups}" for groups in LOSSES}
    write_json(runs / "evaluate.json", evaluation({models[groups]: figures for groups, figures in LOSSES.items()}))
    write_json(runs / "measured" / "benchmark.json", benchmark(TIMES))
    write_uptraining(runs / "uptraining", runs / "gqa-3")
    write_json(runs / "notes.json", {"a": 1})
    return runs
