"""Times every version of the model at one batch and context. Versions take turns, so that a machine whose speed drifts
favours none of them.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from gqa_convert.families.loading import SOUND_POSITIONS
from gqa_convert.measuring.latency.decoding import Decoder
from gqa_convert.measuring.results import TimedCell

STEPS = 8
"""Timed decode steps of a turn."""
_PREFILLS = 3


def measure_cells(models: Sequence[Any], cells: Sequence[TimedCell]) -> list[TimedCell]:
    """Time all versions at one batch and context.

    Args:
        models: of the versions.
        cells: what is decoded, one for each model: batch, context, tokens of an encoder and of a sample, and repetitions;
            only the K/V heads differ.

    Returns:
        The cells with times and cache sizes.
    """
    cell, device = cells[0], models[0].device
    repetitions = cell.repetitions or 1
    decoders = [Decoder(model, cell.batch, cell.context, cell.encoder_tokens) for model in models]
    filled = _alternate([partial(_timed, each.prefill, device) for each in decoders], min(_PREFILLS, repetitions))
    decoded = _alternate([partial(_turn, each, device) for each in decoders], repetitions)
    return [_with_cache(*each) for each in zip(map(with_times, cells, filled, decoded), decoders, strict=True)]


def _alternate(turns: Sequence[Callable[[], float]], repetitions: int) -> list[list[float]]:
    """What the calls of each version return in so many repetitions, each of which starts one version later, after a
    warm-up.
    """
    measured: list[list[float]] = [[] for _ in turns]
    for repetition in range(1 + repetitions):
        for place in range(len(turns)):
            number = (repetition - 1 + place) % len(turns)
            measured[number].append(turns[number]())
    return [found[1:] for found in measured]


def _turn(decoder: Decoder, device: Any) -> float:
    """Take a turn and return its seconds per token."""

    def walk() -> None:
        for _ in range(STEPS):
            decoder.step()

    decoder.step()  # the version before has left its own weights in the processor's caches
    seconds = _timed(walk, device)
    decoder.rewind()
    return seconds / STEPS


def _timed(work: Callable[[], object], device: Any) -> float:
    """The seconds that the work takes on a torch device."""
    _wait(device)
    began = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: Any) -> None:
    """Wait for a GPU, which works asynchronously."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def with_times(cell: TimedCell, prefills: Sequence[float], decodes: Sequence[float]) -> TimedCell:
    """The cell with the quartiles of the seconds of prefills, and of the decode steps of a token."""
    low, middle, high = (1e3 * np.quantile(decodes, (0.25, 0.5, 0.75))).tolist()
    prefill = 1e3 * float(np.median(prefills))
    times = {
        "decode_ms_per_token": middle,
        "decode_ms_low": low,
        "decode_ms_high": high,
        "decode_tokens_per_second": 1e3 * cell.batch / middle,
        "prefill_ms": prefill,
        "sample_ms": prefill + (cell.new_tokens or 0) * middle,
    }
    return cell.model_copy(update=times)


def _with_cache(cell: TimedCell, decoder: Decoder) -> TimedCell:
    """The cell with the bytes of the decoder's cache and of that of cross-attention."""
    own, cross = decoder.cache_bytes()
    found = {"kv_bytes_per_token": own / cell.context / cell.batch, "kv_bytes": own + cross}
    if cell.encoder_tokens is not None:
        per_token = cross / cell.encoder_tokens / cell.batch
        found["cross_kv_bytes_per_encoder_token"] = per_token
        if decoder.hears:
            found["cross_kv_bytes_per_30_seconds"] = 30 * SOUND_POSITIONS * per_token
    return cell.model_copy(update=found)
