"""Decode speed and live K/V bytes of a model at several numbers of K/V heads.

transformers is timed by the code of `gqa-convert benchmark`. Other engines are named with the reason why they were not
measured.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gqa_convert.measuring.benchmark import BenchmarkOptions, benchmark_model

OTHER_ENGINES = {"llama.cpp": "llama_cpp", "vLLM": "vllm"}


def decode(folder: Path, groups: tuple[int, ...], contexts: tuple[int, ...]) -> dict[str, Any]:
    """Times of transformers, and why other engines have none.

    Args:
        folder: the source.
        groups: numbers of K/V heads, the source's own among them.
        contexts: tokens in the cache.
    """
    options = BenchmarkOptions(groups=groups, context=contexts, prefill=False)
    measured = benchmark_model(folder, options=options)
    times = [
        {
            "engine": "transformers",
            "groups": cell.groups,
            "context": cell.context,
            "tokens_per_second": round(cell.decode_tokens_per_second or 0, 2),
            "ms_per_token": [
                round(value or 0, 2) for value in (cell.decode_ms_low, cell.decode_ms_per_token, cell.decode_ms_high)
            ],
            "kv_bytes": cell.kv_bytes,
        }
        for cell in measured.results
    ]
    return {
        "times": times,
        "dtype": measured.dtype,
        "threads": measured.threads,
        "attention": measured.attention,
        "not_measured": {engine: reason(package) for engine, package in OTHER_ENGINES.items()},
    }


def reason(package: str) -> str:
    """Why an engine was not timed."""
    if find_spec(package) is None:
        return f"the package {package} is not installed"
    return f"the package {package} is installed, but this benchmark has no timing code for it"
