"""The printed result of a benchmark."""

from gqa_convert.checkpoint.byte_sizes import size
from gqa_convert.measuring.results import BenchmarkFile, TimedCell

from .screen import number, print_note, stdout_console, styled
from .tables import Column, show_table


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
        encoder = f", {cells[0].encoder_tokens} tokens of input" if cells[0].encoder_tokens else ""
        title = (
            f"batch {batch}, {context:,} tokens cached{encoder}; times in ms, a sample has {cells[0].new_tokens} tokens"
        )
        _show_cells(cells, result, title)
    if result.engine is None:
        source = "The model's own number of K/V heads has its weights; other" if result.weights == "own" else "All"
        print_note(f"{source} versions have random keys and values, on which time does not depend.")
    if result.memory_bytes is not None:
        print_note(
            f"The largest batch and context fit {size(result.memory_bytes)} with the weights, by their exact bytes; "
            "activations and the framework are not counted, and nothing was allocated to prove it."
        )
    if result.plot:
        console.print(f"plot     {result.plot}", soft_wrap=True)


def _show_cells(cells: list[TimedCell], result: BenchmarkFile, title: str) -> None:
    source = next(
        (cell for cell in cells if result.fingerprint == cell.fingerprint and cell.groups == result.kv_heads), None
    )
    columns = ["model"] if result.engine else []
    columns += ["K/V heads", "ms/token", "quartiles", "speed", "tokens/s", "prefill", "sample"]
    if result.engine is None:
        columns += ["K/V per token", "of source's"]
    if result.memory_bytes is not None:
        columns += ["largest batch", "largest context"]
    rows = []
    for cell in cells:
        time = cell.decode_ms_per_token or 0.0
        row = [cell.model or ""] if result.engine else []
        row += [
            _heads(cell.groups),
            f"{time:.3g}",
            f"{cell.decode_ms_low or 0:.3g}-{cell.decode_ms_high or 0:.3g}",
            f"{(source.decode_ms_per_token or 0) / time:.2f}x" if source else "",
            number(cell.decode_tokens_per_second, ",.1f"),
            number(cell.prefill_ms, ",.1f"),
            number(cell.sample_ms, ",.0f"),
        ]
        if result.engine is None:
            per_token = size(cell.kv_bytes_per_token or 0)
            if cell.cross_kv_bytes_per_encoder_token is not None:
                per_token += f" + {size(cell.cross_kv_bytes_per_encoder_token)}"
            row += [per_token, f"{(cell.kv_bytes or 0) / source.kv_bytes:.1%}" if source and source.kv_bytes else ""]
        if result.memory_bytes is not None:
            row += [number(cell.largest_batch, ","), number(cell.largest_context, ",")]
        rows.append(row)
    show_table([Column(heading, "left" if heading == "model" else "right") for heading in columns], rows, title=title)


def _heads(heads: int | list[int] | None) -> str:
    return f"{min(heads)}-{max(heads)}" if isinstance(heads, list) else str(heads)
