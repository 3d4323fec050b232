"""The printed result of a benchmark."""

from pathlib import Path

from gqa_convert.checkpoint.byte_sizes import size
from gqa_convert.measuring.evaluation.table import filled, number
from gqa_convert.measuring.results import BenchmarkFile, TimedCell

from .screen import print_note, stdout_console, tokens_text
from .tables import show_table


def show_benchmark(result: BenchmarkFile) -> None:
    """Print a row for each number N of K/V heads, batch and context. Speed is relative to the source's own N, if that was
    timed; nothing is relative to another version.
    """
    engine = f"{result.engine} {result.engine_version}"
    if result.engine is None:
        engine = f"transformers, attention {result.attention}"
    about = f"{result.model}: {result.model_type}, {_heads(result.kv_heads)} K/V heads, {result.dtype}; {engine}"
    machine = result.machine
    stdout_console().print(f"{about}; {machine.processor}, {machine.device}")
    sources = {
        (cell.batch, cell.context): cell.decode_ms_per_token
        for cell in result.results
        if (cell.fingerprint, cell.groups) == (result.fingerprint, result.kv_heads)
    }
    rows = [_cells(cell, sources.get((cell.batch, cell.context))) for cell in result.results]
    show_table(filled(rows))
    if result.engine is None:
        print_note("versions without the model's weights have random keys and values, on which time does not depend")


def _cells(cell: TimedCell, source: float | None) -> dict[str, str]:
    time = cell.decode_ms_per_token or 0.0
    cross = cell.cross_kv_bytes_per_30_seconds
    return {
        "model": Path(cell.model).name if cell.model else "",
        "N": _heads(cell.groups),
        "batch": str(cell.batch),
        "context": tokens_text(cell.context),
        "ms/token": f"{time:.3g}",
        "speed": f"{source / time:.2f}x" if source else "",
        "tokens/s": number(cell.decode_tokens_per_second, ",.1f"),
        "prefill ms": number(cell.prefill_ms, ",.1f"),
        "K/V cache": size(cell.kv_bytes) if cell.kv_bytes else "",
        "cross, 30 s": size(round(cross)) if cross else "",
    }


def _heads(heads: int | list[int] | None) -> str:
    if isinstance(heads, list):
        return f"{min(heads)}-{max(heads)}"
    return str(heads)
