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
    some = "" if result.layers == result.model_layers else f", {result.layers} of {result.model_layers} layers"
    console.print(
        styled(
            (result.model or "", "bold"),
            f": {result.model_type}, {result.heads} query heads, {in_words(result.kv_heads or 0)} K/V heads{some}, {result.dtype}; "
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
    if any("attention_floor_ms_per_token" in each.model_fields_set for each in result.results):
        notes.append(
            "attention: the attention modules with their projections, timed in separate steps; floor: the time to read their weights and "
            "the cache once at the memory bandwidth measured in between"
        )
    if some:
        notes.append(
            f"whole model: an estimate from the layers' measured time x {(result.model_layers or 0) / (result.layers or 1):g} and the measured rest; "
            "prefill times are scaled by the same factor"
        )
    for note in notes:
        print_note(note)
    if result.plot:
        console.print(f"plot     {result.plot}", soft_wrap=True)


def _show_cell(records: list[TimedCell], result: BenchmarkFile) -> None:
    first = records[0]
    encoder = "" if first.encoder_tokens is None else f", {first.encoder_tokens} tokens of input"
    optional = {
        "attention_ms_per_token": ("attention", ",.2f"),
        "attention_floor_ms_per_token": ("floor", ",.2f"),
        "estimated_decode_ms_per_token": ("whole model", ",.1f"),
        "largest_batch": ("largest batch", ","),
        "largest_context": ("largest context", ","),
    }
    shown = {key: how for key, how in optional.items() if key in first.model_fields_set}
    headings = [
        "N",
        "ms/token",
        "quartiles",
        "speed",
        "tokens/s",
        "prefill",
        "sample",
        "K/V/token",
        *(name for name, _ in shown.values()),
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
            *(number(getattr(each, key), form) for key, (_, form) in shown.items()),
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
