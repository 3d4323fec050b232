"""Times an engine on models: tokens per second at a batch and a number of tokens in the K/V cache."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from gqa_convert.checkpoint.fingerprint import fingerprint
from gqa_convert.checkpoint.machine import measurement
from gqa_convert.checkpoint.source import Checkpoint, open_local
from gqa_convert.conversion.plan import make_plan
from gqa_convert.errors import UnsupportedFamilyError, WorkerError
from gqa_convert.measuring import Progress, no_progress
from gqa_convert.measuring.latency.models import stated_dtype
from gqa_convert.measuring.latency.run import CONTEXT, BenchmarkOptions, times_of
from gqa_convert.measuring.results import BenchmarkFile, TimedCell

from .checking import has_our_code, why_unsupported
from .engines import ENGINES, find_interpreter
from .request import Request
from .worker import OK, ask

_SECONDS = 86400.0
"""A time limit for each model: a user who waits can stop the program before."""


def time_engine(
    name: str,
    models: Sequence[str | Path],
    options: BenchmarkOptions,
    python: str | None = None,
    command: list[str] | None = None,
    progress: Progress = no_progress,
) -> BenchmarkFile:
    """Time an engine on models, one after the other, each in a process of its own.

    A repetition decodes one token after prompts of random tokens, and then as many more; the difference of both times is
    that of decoding.

    Args:
        name: of the engine.
        models: folders or Hub ids; the first is the source, with which the others are compared.
        options: of which batch, context, new_tokens, repetitions and dtype count.
        python: the interpreter that has the engine; None for this one.
        command: the command line, for the record.
        progress: called with the name of a stage, the steps done and the number of steps.

    Raises:
        OptionError: there is no such engine.
        MissingExtraError: the engine is not installed.
        UnsupportedFamilyError: it can't load one of the models.
        WorkerError: it failed on a model.
    """
    python, version = find_interpreter(name, python)
    settings = list(product(options.batch, options.context or [CONTEXT]))
    plans = [make_plan(_open(model), 1) for model in models]
    source = plans[0].checkpoint
    head = measurement("benchmark", command)
    cells = []
    for done, plan in enumerate(plans):
        progress("timing", done, len(plans))
        checkpoint = plan.checkpoint
        request = Request(
            folder=str(checkpoint.local_folder.resolve()),
            config=checkpoint.config,
            dtype=stated_dtype(checkpoint.config, options.dtype),
            # a prompt, its first token, and those that are timed
            context=max(context for _, context in settings) + 1 + options.new_tokens,
            run_code=has_our_code(checkpoint.local_folder, checkpoint.config),
            timings=settings,
            new_tokens=options.new_tokens,
            repetitions=options.repetitions,
        )
        outcome = ask(python, ENGINES[name].module, request, _SECONDS)
        if outcome.status != OK:
            raise WorkerError(f"the engine did not run {checkpoint.source_id} ({outcome.status}): {outcome.detail}")
        head["machine"]["device"] = outcome.device
        known = fingerprint(checkpoint.local_folder)
        counts = [layer.kv_heads for layer in sorted(plan.layers, key=lambda layer: layer.number)]
        for (batch, context), times in zip(settings, outcome.times, strict=True):
            decodes = [(last - first) / options.new_tokens for first, last in times]
            if min(decodes) <= 0:
                raise WorkerError(
                    f"{options.new_tokens} tokens take too little time to be measured: raise --new-tokens"
                )
            cell = TimedCell(
                groups=counts[0] if len(set(counts)) == 1 else counts,
                model=checkpoint.source_id,
                fingerprint=known,
                batch=batch,
                context=context,
                new_tokens=options.new_tokens,
                repetitions=options.repetitions,
                **times_of(batch, [first for first, _ in times], decodes),
            )
            cells.append(cell)
    return BenchmarkFile(
        **head,
        engine=name,
        engine_version=version,
        model=source.source_id,
        fingerprint=cells[0].fingerprint,
        model_type=plans[0].family.model_type,
        dtype=stated_dtype(source.config, options.dtype),
        heads=plans[0].heads,
        kv_heads=cells[0].groups,
        results=cells,
    )


def _open(model: str | Path) -> Checkpoint:
    """A checkpoint that an engine may be able to run, in a local folder."""

    def check(checkpoint: Checkpoint) -> None:
        reason = why_unsupported(checkpoint.folder or Path(model), checkpoint.config)
        if reason:
            raise UnsupportedFamilyError(f"{model} can't be timed in an engine: {reason}")

    checkpoint = open_local(model, None, check)
    check(checkpoint)
    return checkpoint
