"""The printed result of a benchmark."""

from gqa_convert.checkpoint.byte_sizes import size
from gqa_convert.measuring.results.kv_heads import in_words
from gqa_convert.measuring.results.schemas import BenchmarkFile, Machine, TimedCell

from .screen import number, print_note, stdout_console, styled
from .tables import show_table


def show_benchmark(result: BenchmarkFile) -> None:
    """Print a table for each batch and context, with a row for each N and the speed relative to the model's own N."""
    console = stdout_console()
    machine = result.machine or Machine()
    console.print(
        styled(
            (result.model or "", "bold"),
            f": {result.model_type}, {result.heads} query heads, {in_words(result.kv_heads or 0)} K/V heads, {result.dtype}; "
            f"{machine.processor}, {machine.device}, {result.threads} threads; attention: {result.attention}",
        ),
        soft_wrap=True,
    )
    cells = dict.fromkeys((each.batch, each.context) for each in result.results)
    for batch, context in cells:
        _show_cell([each for each in result.results if (each.batch, each.context) == (batch, context)], result)
    if result.weights == "own":
        weights = (
            f"N = {in_words(result.kv_heads or 0)} has the model's weights, and other N have random keys and values"
        )
    else:
        weights = "every N has random keys and values"
    notes = [f"{weights}; time does not depend on them, and quality is not measured here"]
    if result.memory is not None:
        notes.append(
            f"largest batch and context: those that fit {size(result.memory.bytes or 0)}; {result.memory.assumed}"
        )
    for note in notes:
        print_note(note)
    if result.plot:
        console.print(f"plot     {result.plot}", soft_wrap=True)


def _show_cell(records: list[TimedCell], result: BenchmarkFile) -> None:
    first = records[0]
    encoder = "" if first.encoder_tokens is None else f", {first.encoder_tokens} tokens of input"
    optional = {
        "largest_batch": "largest batch",
        "largest_context": "largest context",
    }
    shown = {key: heading for key, heading in optional.items() if key in first.model_fields_set}
    headings = [
        "N",
        "ms/token",
        "quartiles",
        "speed",
        "tokens/s",
        "prefill",
        "sample",
        "K/V/token",
        *shown.values(),
    ]
    rows = []
    own = next((each.decode_ms_per_token for each in records if each.groups == result.kv_heads), None)
    for each in records:
        time, cross = each.decode_ms_per_token or 0.0, each.cross_kv_bytes_per_encoder_token
        cells = [
            in_words(each.groups),
            _short(time),
            f"{_short(each.decode_ms_low or 0.0)}-{_short(each.decode_ms_high or 0.0)}",
            f"{own / time:.2f}x" if own and time else "",
            number(each.decode_tokens_per_second, ",.1f"),
            number(each.prefill_ms, ".1f"),
            number(each.sample_ms, ",.0f"),
            _bytes(each.kv_bytes_per_token or 0) + ("" if cross is None else f" + {_bytes(cross)}"),
            *(number(getattr(each, key), ",") for key in shown),
        ]
        rows.append(cells)
    console = stdout_console()
    console.print(
        f"batch {first.batch}, {first.context} tokens cached{encoder}; "
        f"{first.repetitions} x {result.steps} steps; times in ms, a sample decodes {first.new_tokens}",
        soft_wrap=True,
    )
    show_table(headings, rows)


def _short(milliseconds: float) -> str:
    return f"{milliseconds:.3g}" if milliseconds < 100 else f"{milliseconds:,.0f}"


def _bytes(count: float) -> str:
    return size(count).replace(" bytes", " B")
