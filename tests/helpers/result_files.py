"""What the commands write about measurements, with figures that are easily told apart."""

import json
from pathlib import Path
from typing import Any

HEAD = {
    "format_version": 1,
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
        "data": {"source": "held out.txt"},
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
        "dtype": "float32",
        "heads": 12,
        "weights": "own",
        "attention": "gqa",
        "results": results,
    } | more
