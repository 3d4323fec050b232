"""The printed result of a benchmark."""

from gqa_convert.checkpoint.byte_sizes import size
from gqa_convert.measuring.results import BenchmarkFile, TimedCell

from .screen import number, print_note, stdout_console, styled
from .tables import Column, show_table

_NUMBERS = "K/V heads,ms/token,quartiles,speed,tokens/s,prefill,sample,K/V per token,of source's"
_COLUMNS = [Column("model"), *(Column(heading, "right") for heading in _NUMBERS.split(","))]


def show_benchmark(result: BenchmarkFile) -> None:
    """Print a table for each batch and context. Speed and K/V cache are relative to the source's own K/V heads, if these
    were timed; nothing is relative to another version.
    """
    console = stdout_console()
    where = (
        f"{result.engine} {result.engine_version}" if result.engine else f"transformers, attention {result.attention}"
    )
    machine = result.machine
    about = f": {result.model_type}, {_heads(result.kv_heads)} K/V heads, {result.dtype}; {where}; {machine.processor}, {machine.device}"
    console.print(styled((result.model, "bold"), about), soft_wrap=True)
    for batch, context in dict.fromkeys((cell.batch, cell.context) for cell in result.results):
        cells = [cell for cell in result.results if (cell.batch, cell.context) == (batch, context)]
        title = f"batch {batch}, {context:,} tokens cached; times in ms, a sample has {cells[0].new_tokens} tokens"
        _show_cells(cells, result, title)
    if result.engine is None:
        source = "The model's own number of K/V heads has its weights; other" if result.weights == "own" else "All"
        print_note(f"{source} versions have random keys and values, on which time does not depend.")


def _show_cells(cells: list[TimedCell], result: BenchmarkFile, title: str) -> None:
    """Print a table without the columns of what was not measured."""
    source = next(
        (cell for cell in cells if cell.fingerprint == result.fingerprint and cell.groups == result.kv_heads), None
    )
    rows = [_row(cell, source) for cell in cells]
    shown = [place for place in range(len(_COLUMNS)) if any(row[place] for row in rows)]
    columns = [_COLUMNS[place] for place in shown]
    show_table(columns, [[row[place] for place in shown] for row in rows], title=title)


def _row(cell: TimedCell, source: TimedCell | None) -> list[str]:
    time, speed, share = cell.decode_ms_per_token or 0.0, "", ""
    if source is not None:
        speed = f"{(source.decode_ms_per_token or 0) / time:.2f}x"
    if source is not None and source.kv_bytes and cell.kv_bytes:
        share = f"{cell.kv_bytes / source.kv_bytes:.1%}"
    return [
        cell.model or "",
        _heads(cell.groups),
        f"{time:.3g}",
        f"{cell.decode_ms_low:.3g}-{cell.decode_ms_high:.3g}",
        speed,
        number(cell.decode_tokens_per_second, ",.1f"),
        number(cell.prefill_ms, ",.1f"),
        number(cell.sample_ms, ",.0f"),
        "" if cell.kv_bytes_per_token is None else size(cell.kv_bytes_per_token),
        share,
    ]


def _heads(heads: int | list[int] | None) -> str:
    return f"{min(heads)}-{max(heads)}" if isinstance(heads, list) else str(heads)
