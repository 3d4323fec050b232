"""Times a model at several numbers of K/V heads.

The versions take turns, so that a machine whose speed drifts favours none of them.
"""

import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from gqa_convert.checkpoint.devices import chosen_device
from gqa_convert.checkpoint.fingerprint import fingerprint
from gqa_convert.checkpoint.machine import measurement
from gqa_convert.checkpoint.source import open_local
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.errors import OptionError
from gqa_convert.families.context_length import stated_positions
from gqa_convert.measuring import Progress, no_progress
from gqa_convert.measuring.latency.decoding import STEPS, Decoder
from gqa_convert.measuring.latency.models import make_models, plan_versions, stated_dtype
from gqa_convert.measuring.out_of_memory import memory_explained
from gqa_convert.measuring.results import BenchmarkFile, TimedCell

CONTEXT = 512
"""The default number of cached tokens."""
_PREFILLS = 3
_TIMES = ("decode_ms_low", "decode_ms_per_token", "decode_ms_high", "prefill_ms_low", "prefill_ms", "prefill_ms_high")
"""The quartiles of a cell."""


@dataclass(frozen=True)
class BenchmarkOptions:
    """How a model is timed. Named as the command line names them.

    Attributes:
        candidates: K/V heads per layer to time; by default the model's own number and its divisors, at most seven.
        batch: sequences decoded at once.
        context: tokens in the cache when the timed steps begin, and of an encoder's input; by default 512, or half the
            model's positions.
        repetitions: timed turns of each version.
        dtype: by default the checkpoint's.
        device: `cpu`, `cuda` or `cuda:1`; by default a GPU where there is one.
        revision: branch, tag or commit on the Hub.
    """

    candidates: Sequence[int] | None = None
    batch: Sequence[int] = (1,)
    context: Sequence[int] | None = None
    repetitions: int = 8
    dtype: str | None = None
    device: str | None = None
    revision: str | None = None


def benchmark_model(
    model: str | Path,
    options: BenchmarkOptions,
    command: list[str] | None = None,
    progress: Progress = no_progress,
) -> BenchmarkFile:
    """Measure decode latency, throughput, prefill and K/V bytes of a model at several numbers of K/V heads.

    Every version has the shapes of a converted model. Weights that do not exist are random; the time does not depend on
    their values.

    Args:
        model: a local folder or a Hub id, timed with its weights at its own number of K/V heads.
        options: what is timed, how often and on what.
        command: the command line, for the record.
        progress: called with the name of a stage, the steps done and the number of steps.

    Returns:
        The measurement; `results` has an entry for each version, batch and context.

    Raises:
        GQAConvertError: one of its subclasses for every mistake; DeviceMemoryError (exit code 1) if the memory does not
            suffice.
    """
    plan = partial(plan_versions, candidates=options.candidates)
    opened = open_local(model, options.revision, plan)
    plans = plan(opened)
    dtype = stated_dtype(opened.config, options.dtype)
    device = chosen_device(options.device)
    positions = stated_positions(opened.config)
    contexts = options.context or [min(CONTEXT, (positions or 2 * CONTEXT) // 2)]
    if positions is not None and max(contexts) >= positions - STEPS:
        raise OptionError(
            f"--context {max(contexts)}: the model has {positions} positions, and decode steps follow: give at most {positions - 1 - STEPS}"
        )
    any_plan = next(iter(plans.values()))
    own = any_plan.source_kv_heads
    known = fingerprint(opened)
    settings = list(itertools.product(options.batch, contexts))
    cells = []
    with memory_explained(opened.source_id, "time fewer --candidates, or a smaller --batch or --context"):
        progress("building models", 0, 1)
        models, attention = make_models(opened, plans, dtype, device)
        for done, (batch, context) in enumerate(settings):
            progress("timing", done, len(settings))
            decoders = [Decoder(model, batch, context) for model in models]
            prefills = _alternate([each.prefill for each in decoders], min(_PREFILLS, options.repetitions))
            turns = _alternate([each.turn for each in decoders], options.repetitions)
            for groups, decoder, filled, decoded in zip(plans, decoders, prefills, turns, strict=True):
                own_bytes, cross_bytes = decoder.cache_bytes()
                cell = TimedCell(
                    groups=groups,
                    fingerprint=known if groups == own else None,
                    batch=batch,
                    context=context,
                    repetitions=options.repetitions,
                    kv_bytes=own_bytes + cross_bytes,
                    kv_bytes_per_token=own_bytes / context / batch,
                    **_times(batch, filled, decoded),
                )
                cells.append(cell)
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


def _alternate(turns: Sequence[Callable[[], float]], repetitions: int) -> list[list[float]]:
    """What the calls of each version return in so many repetitions, each of which starts one version later, after a
    warm-up.
    """
    measured: list[list[float]] = [[] for _ in turns]
    for repetition in range(-1, repetitions):
        for place in range(len(turns)):
            number = (repetition + place) % len(turns)
            measured[number].append(turns[number]())
    return [found[1:] for found in measured]


def _times(batch: int, prefills: Sequence[float], decodes: Sequence[float]) -> JsonObject:
    """The keys of a cell that state times, medians and quartiles: from the seconds of prefills, and of the decode steps of
    a token.
    """
    quartiles = 1e3 * np.quantile(decodes, (0.25, 0.5, 0.75)), 1e3 * np.quantile(prefills, (0.25, 0.5, 0.75))
    found = dict(zip(_TIMES, np.concatenate(quartiles).tolist(), strict=True))
    return found | {"decode_tokens_per_second": 1e3 * batch / found["decode_ms_per_token"]}
