"""Times every version of the model at one batch and context."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gqa_convert.measuring.benchmark.decoding import Decoder
from gqa_convert.measuring.benchmark.options import LEAD, BenchmarkOptions
from gqa_convert.measuring.benchmark.timing import Clock, alternate, clock_for, quartiles, timed
from gqa_convert.measuring.benchmark.versions import Version
from gqa_convert.measuring.results.schemas import TimedCell

_PREFILLS = 3


@dataclass(frozen=True, slots=True)
class Cell:
    """The number of sequences, of tokens in each cache and, for an encoder-decoder, of input tokens."""

    batch: int
    context: int
    encoder_tokens: int | None


def measure_cell(
    versions: Sequence[Version],
    cell: Cell,
    options: BenchmarkOptions,
    progress: Callable[[int, int], None],
    clock: Clock | None = None,
) -> list[TimedCell]:
    """Time all versions in alternation.

    Args:
        versions: of the model.
        cell: what is decoded.
        options: repetitions, steps and what is timed.
        progress: called with the number of turns taken and the number of all turns.
        clock: of the device.

    Returns:
        A result for each version.
    """
    clock = clock or clock_for(versions[0].model.device)
    decoders = [Decoder(version.model, cell.batch, cell.context, cell.encoder_tokens) for version in versions]
    prefills = min(_PREFILLS, options.repetitions) if options.prefill else 0
    total = len(versions) * (prefills + options.warm_up + options.repetitions)
    taken = 0

    def done() -> None:
        nonlocal taken
        taken += 1
        progress(taken, total)

    # the last prefill leaves each version its cache
    calls = [functools.partial(timed, clock, decoder.prefill) for decoder in decoders]
    filled = alternate(calls, prefills, done=done)
    for decoder in decoders:
        decoder.fill()
    sizes = [decoder.cache_bytes() for decoder in decoders]
    turns = [_turn(decoder, options.steps, clock) for decoder in decoders]
    measured = alternate(turns, options.repetitions, options.warm_up, done)
    return [
        _record(version, cell, options, own_bytes, cross_bytes, prefill, decode)
        for version, (own_bytes, cross_bytes), prefill, decode in zip(versions, sizes, filled, measured, strict=True)
    ]


def _turn(decoder: Decoder, steps: int, clock: Clock) -> Callable[[], float]:
    """A call that takes a turn and returns its seconds per token."""

    def walk() -> None:
        for _ in range(steps):
            decoder.step()

    def turn() -> float:
        for _ in range(LEAD):
            decoder.step()
        seconds = timed(clock, walk) / steps
        decoder.rewind()
        return seconds

    return turn


def _record(
    version: Version,
    cell: Cell,
    options: BenchmarkOptions,
    own_bytes: int,
    cross_bytes: int,
    prefill: Sequence[float],
    decode: Sequence[float],
) -> TimedCell:
    low, middle, high = (1e3 * seconds for seconds in quartiles(decode))
    prefill_ms = 1e3 * quartiles(prefill)[1] if prefill else None
    record = TimedCell(
        groups=version.groups,
        batch=cell.batch,
        context=cell.context,
        decode_ms_per_token=middle,
        decode_ms_low=low,
        decode_ms_high=high,
        decode_tokens_per_second=1e3 * cell.batch / middle,
        prefill_ms=prefill_ms,
        sample_ms=None if prefill_ms is None else prefill_ms + options.new_tokens * middle,
        new_tokens=options.new_tokens,
        kv_bytes_per_token=own_bytes / cell.context / cell.batch,
        kv_bytes=own_bytes + cross_bytes,
        repetitions=options.repetitions,
    )
    if cell.encoder_tokens is None:
        return record
    crossed = cross_bytes / cell.encoder_tokens / cell.batch
    return record.model_copy(
        update={"encoder_tokens": cell.encoder_tokens, "cross_kv_bytes_per_encoder_token": crossed}
    )
