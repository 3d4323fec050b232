"""Times a model at several numbers of K/V heads."""

import gc
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gqa_convert.checkpoint.byte_sizes import size
from gqa_convert.checkpoint.devices import chosen_device
from gqa_convert.checkpoint.fingerprint import fingerprint
from gqa_convert.checkpoint.machine import available_memory, measurement
from gqa_convert.conversion.plan import Plan
from gqa_convert.errors import OptionError
from gqa_convert.families.context_length import stated_positions
from gqa_convert.measuring import Progress, no_progress
from gqa_convert.measuring.latency.cells import STEPS, measure_cells
from gqa_convert.measuring.latency.models import make_models, open_model, plan_versions, stated_dtype
from gqa_convert.measuring.out_of_memory import memory_explained
from gqa_convert.measuring.results import BenchmarkFile, TimedCell

CONTEXT: Final = 512
"""The default number of cached tokens."""


@dataclass(frozen=True, slots=True)
class BenchmarkOptions:
    """How a model is timed. Named as the command line names them.

    Attributes:
        candidates: K/V heads per layer to time; by default the model's own number and its divisors, at most seven.
        batch: sequences decoded at once.
        context: tokens in the cache when the timed steps begin, and of an encoder's input; by default 512, or half the
            model's positions.
        new_tokens: tokens decoded per sample, for the time per sample.
        repetitions: timed turns of each version.
        dtype: by default the checkpoint's.
        device: `cpu`, `cuda` or `cuda:1`; by default a GPU where there is one.
        revision: branch, tag or commit on the Hub.
    """

    candidates: Sequence[int] | None = None
    batch: Sequence[int] = (1,)
    context: Sequence[int] | None = None
    new_tokens: int = 128
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
    import torch

    opened = open_model(model, options.revision)
    dtype = stated_dtype(opened.config, options.dtype)
    device = torch.device(chosen_device(options.device))
    contexts = _contexts(options, stated_positions(opened.config))
    plans, own = plan_versions(opened, options.candidates)
    _check_memory(plans, max(options.batch), max(contexts), device)
    with memory_explained(opened.source_id, "time fewer --candidates, or a smaller --batch or --context"):
        progress("building models", 0, 1)
        models, attention = make_models(opened, plans, own, dtype, device)
        cells = _measure(plans, models, contexts, options, progress)
    assert opened.folder is not None
    known = fingerprint(opened.folder)
    for number, cell in enumerate(cells):
        if cell.groups == own:
            cells[number] = cell.model_copy(update={"fingerprint": known})
    return BenchmarkFile(
        **measurement("benchmark", command, str(device)),
        model=opened.source_id,
        fingerprint=known,
        model_type=plans[0].family.model_type,
        dtype=dtype,
        heads=plans[0].heads,
        kv_heads=own,
        weights="own" if any(cell.fingerprint for cell in cells) else "random",
        attention=attention,
        results=cells,
    )


def _contexts(options: BenchmarkOptions, positions: int | None) -> Sequence[int]:
    contexts = options.context or [min(CONTEXT, (positions or 2 * CONTEXT) // 2)]
    if positions is not None and max(contexts) >= positions - STEPS:
        raise OptionError(
            f"--context {max(contexts)}: the model has {positions} positions, and decode steps follow: give at most {positions - 1 - STEPS}"
        )
    return contexts


def _check_memory(plans: Sequence[Plan], batch: int, context: int, device: Any) -> None:
    """Refuse a K/V cache that is larger than the memory."""
    needed = batch * max(plan.kv_cache_bytes(tokens=context).after for plan in plans)
    free = available_memory(device)
    if free is not None and needed > free:
        raise OptionError(
            f"--context {context} with --batch {batch}: the K/V cache takes {size(needed)}, and {device} has {size(free)}: give less"
        )


def _measure(
    plans: Sequence[Plan], models: Sequence[Any], contexts: Sequence[int], options: BenchmarkOptions, progress: Progress
) -> list[TimedCell]:
    """Time every version at every batch and context."""
    config = models[0].config
    settings = list(itertools.product(options.batch, contexts))
    measured: list[TimedCell] = []
    for done, (batch, context) in enumerate(settings):
        progress("timing", done, len(settings))
        shared: dict[str, Any] = {"batch": batch, "context": context, "new_tokens": options.new_tokens}
        if config.is_encoder_decoder:
            # a speech model's encoder has one length; other encoders read as many tokens as the decoder has cached
            shared["encoder_tokens"] = getattr(config, "max_source_positions", context)
        cells = [TimedCell(groups=plan.stated_groups, repetitions=options.repetitions, **shared) for plan in plans]
        measured += measure_cells(models, cells)
        gc.collect()
    progress("timing", len(settings), len(settings))
    return measured
