"""The printed result of a benchmark."""

from pathlib import Path

from gqa_convert.checkpoint.byte_sizes import size
from gqa_convert.measuring.evaluation.table import number
from gqa_convert.measuring.results import BenchmarkFile, TimedCell

from .screen import print_note, stdout_console, tokens_text
from .tables import show_table

_COLUMNS = ["N", "batch", "context", "ms/token", "speed", "tokens/s", "prefill ms", "K/V cache"]


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
    sources = {}
    for cell in result.results:
        if cell.fingerprint == result.fingerprint and cell.groups == result.kv_heads:
            sources[cell.batch, cell.context] = cell.decode_ms_per_token
    columns = [*_COLUMNS]
    if result.engine is not None:
        columns.insert(0, "model")
    if result.results[0].cross_kv_bytes_per_30_seconds is not None:
        columns.append("cross, 30 s")
    rows = []
    for cell in result.results:
        row = _row(cell, sources.get((cell.batch, cell.context)))
        if cell.model is not None:
            row.insert(0, Path(cell.model).name)
        if cell.cross_kv_bytes_per_30_seconds is not None:
            row.append(size(round(cell.cross_kv_bytes_per_30_seconds)))
        rows.append(row)
    show_table(columns, rows)
    if result.engine is None:
        print_note("versions without the model's weights have random keys and values, on which time does not depend")


def _row(cell: TimedCell, source: float | None) -> list[str]:
    time = cell.decode_ms_per_token or 0.0
    speed = cache = ""
    if source is not None:
        speed = f"{source / time:.2f}x"
    if cell.kv_bytes is not None:
        cache = size(cell.kv_bytes)
    return [
        _heads(cell.groups),
        str(cell.batch),
        tokens_text(cell.context),
        f"{time:.3g}",
        speed,
        number(cell.decode_tokens_per_second, ",.1f"),
        number(cell.prefill_ms, ",.1f"),
        cache,
    ]


def _heads(heads: int | list[int] | None) -> str:
    if isinstance(heads, list):
        return f"{min(heads)}-{max(heads)}"
    return str(heads)
