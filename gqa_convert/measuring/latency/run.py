"""Times a model at several numbers of K/V heads.

The versions take turns, so that a machine whose speed drifts favours none of them.
"""

import gc
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from gqa_convert.checkpoint.fingerprint import fingerprint
from gqa_convert.checkpoint.source import open_local
from gqa_convert.errors import OptionError
from gqa_convert.families.context_length import stated_positions
from gqa_convert.measuring import Progress, memory_explained, no_progress
from gqa_convert.measuring.latency.decoding import STEPS, Decoder
from gqa_convert.measuring.latency.models import make_models, plan_versions
from gqa_convert.measuring.results import BenchmarkFile, TimedCell
from gqa_convert.runtime.machine import chosen_device, measurement

CONTEXT = 512
"""The default number of cached tokens."""
DTYPES = ("float32", "bfloat16", "float16")
_PREFILLS = 3


def benchmark_model(
    model: str | Path,
    *,
    candidates: Sequence[int] | None = None,
    batch: Sequence[int] = (1,),
    context: Sequence[int] | None = None,
    repetitions: int = 8,
    dtype: str | None = None,
    device: str | None = None,
    revision: str | None = None,
    command: list[str] | None = None,
    progress: Progress = no_progress,
) -> BenchmarkFile:
    """Measure decode latency, throughput, prefill and K/V bytes of a model at several numbers of K/V heads.

    Every version has the shapes of a converted model. Weights that do not exist are random; the time does not depend on
    their values.

    Args:
        model: a local folder or a Hub id, timed with its weights at its own number of K/V heads.
        candidates: K/V heads per layer to time; by default the model's own number and its divisors, at most seven.
        batch: sequences decoded at once.
        context: tokens in the cache when the timed steps begin, and of an encoder's input; by default 512, or half the
            model's positions.
        repetitions: timed turns of each version.
        dtype: by default the checkpoint's.
        device: `cpu`, `cuda` or `cuda:1`; by default a GPU where there is one.
        revision: branch, tag or commit on the Hub.
        command: the command line, for the record.
        progress: called with the name of a stage, the steps done and the number of steps.

    Returns:
        The measurement; `results` has an entry for each version, batch and context.

    Raises:
        GQAConvertError: one of its subclasses for every mistake; DeviceMemoryError (exit code 1) if the memory does not
            suffice.
    """
    plan = partial(plan_versions, candidates=candidates)
    opened = open_local(model, revision, plan)
    plans = plan(opened)
    dtype = dtype or opened.config.get("dtype") or opened.config.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise OptionError(
            f"the type {dtype!r} can't be timed: choose one of {', '.join(DTYPES)} with --dtype"
        )
    device = chosen_device(device)
    positions = stated_positions(opened.config)
    contexts = context or [min(CONTEXT, (positions or 2 * CONTEXT) // 2)]
    if positions is not None and max(contexts) >= positions - STEPS:
        raise OptionError(
            f"--context {max(contexts)}: the model has {positions} positions, and decode steps follow: give at most {positions - 1 - STEPS}"
        )
    any_plan = next(iter(plans.values()))
    own = any_plan.source_kv_heads
    known = fingerprint(opened)
    settings = list(itertools.product(batch, contexts))
    cells = []
    with memory_explained(
        opened.source_id, "time fewer --candidates, or a smaller --batch or --context"
    ):
        progress("building models", 0, 1)
        models, attention = make_models(opened, plans, dtype, device)
        for done, (rows, tokens) in enumerate(settings):
            progress("timing", done, len(settings))
            decoders = [Decoder(version, rows, tokens) for version in models]
            prefills = _alternate(decoders, Decoder.prefill, min(_PREFILLS, repetitions))
            turns = _alternate(decoders, Decoder.turn, repetitions)
            for groups, decoder, filled, decoded in zip(
                plans, decoders, prefills, turns, strict=True
            ):
                own_bytes, cross_bytes = decoder.cache_bytes()
                prefill_low, prefill, prefill_high = _milliseconds(filled)
                decode_low, decode, decode_high = _milliseconds(decoded)
                cells.append(
                    TimedCell(
                        groups=groups,
                        fingerprint=known if groups == own else None,
                        batch=rows,
                        context=tokens,
                        decode_ms_per_token=decode,
                        decode_ms_low=decode_low,
                        decode_ms_high=decode_high,
                        decode_tokens_per_second=1e3 * rows / decode,
                        prefill_ms=prefill,
                        prefill_ms_low=prefill_low,
                        prefill_ms_high=prefill_high,
                        kv_bytes_per_token=own_bytes / tokens / rows,
                        kv_bytes=own_bytes + cross_bytes,
                        repetitions=repetitions,
                    )
                )
            del decoders
            gc.collect()
        progress("timing", len(settings), len(settings))
    return BenchmarkFile(
        **measurement("benchmark", command, device),
        model=opened.source_id,
        fingerprint=known,
        model_type=any_plan.family.model_type,
        dtype=dtype,
        heads=any_plan.heads,
        kv_heads=own,
        attention=attention,
        results=cells,
    )


def _alternate(
    decoders: Sequence[Decoder], call: Callable[[Decoder], float], repetitions: int
) -> list[list[float]]:
    """What a call of each version returns in so many repetitions, each of which starts one version later, after a
    warm-up.
    """
    measured: list[list[float]] = [[] for _ in decoders]
    for repetition in range(-1, repetitions):
        for place in range(len(decoders)):
            number = (repetition + place) % len(decoders)
            measured[number].append(call(decoders[number]))
    return [found[1:] for found in measured]


def _milliseconds(seconds: Sequence[float]) -> list[float]:
    """The lower quartile, the median and the upper quartile of times, in milliseconds."""
    quartiles: list[float] = (1e3 * np.quantile(seconds, (0.25, 0.5, 0.75))).tolist()
    return quartiles
