"""Times a model at several numbers of K/V heads."""

import gc
import itertools
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.devices import chosen_device
from gqa_convert.checkpoint.machine import available_memory, measurement
from gqa_convert.checkpoint.paths import local_path
from gqa_convert.checkpoint.resource_errors import is_out_of_memory
from gqa_convert.errors import DeviceMemoryError, OptionError
from gqa_convert.families.context_length import stated_positions
from gqa_convert.measuring.benchmark.options import ATTENTIONS, CONTEXT, DTYPES, LEAD, BenchmarkOptions
from gqa_convert.measuring.benchmark.subject import (
    Subject,
    UnknownAttentionError,
    decoder_layers,
    open_subject,
    transformers_config,
)
from gqa_convert.measuring.benchmark.versions import PlannedVersion, Version, make_versions, plan_versions
from gqa_convert.measuring.pictures import check_picture
from gqa_convert.measuring.results.kv_heads import KVHeads
from gqa_convert.measuring.results.schemas import BenchmarkFile, Head, MemoryBudget

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, the steps done and the number of steps."""

ORDER = "round-robin over the versions within each repetition, begun one further on in the next"


def benchmark_model(
    model: str | Path | None = None,
    *,
    config: str | Path | None = None,
    revision: str | None = None,
    options: BenchmarkOptions | None = None,
    plot: str | Path | None = None,
    command: list[str] | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> BenchmarkFile:
    """Measure decode latency, throughput, prefill and K/V bytes of a model at several numbers of K/V heads.

    Every version has the shapes of a converted model. Weights that do not exist are random; the time does not depend on
    their values.

    Args:
        model: a local folder or a Hub id, timed with its weights at its own number of K/V heads.
        config: in place of `model`, a config.json or the folder that holds one; all weights are random.
        revision: branch, tag or commit on the Hub.
        options: what is timed, how often and on what.
        plot: a picture to draw (.png, .svg or .pdf).
        command: the command line, for the record.
        progress: called with the name of a stage, the steps done and the number of steps.

    Returns:
        The measurement; `results` has an entry for each version, batch and context.

    Raises:
        GQAConvertError: one of its subclasses for every mistake; DeviceMemoryError (exit code 1) if the memory does not
            suffice.
    """
    import torch

    options = options or BenchmarkOptions()
    picture = None if plot is None else local_path(plot)
    if picture is not None:
        check_picture(picture)
    subject = open_subject(model, config, revision)
    dtype = _dtype(subject, options.dtype)
    planned = plan_versions(subject, dtype, options.groups)
    context, encoder_tokens, positions = _lengths(subject, options)
    device = torch.device(chosen_device(options.device))
    weight_bytes: dict[KVHeads, int] = {}
    if options.memory is not None:
        from gqa_convert.measuring.benchmark.memory import check_budget

        weight_bytes = {each.groups: each.plan.weight_bytes_after for each in planned}
        check_budget(options.memory, weight_bytes)
    with _memory_explained():
        return _measure(
            subject,
            planned,
            options,
            context=context,
            encoder_tokens=encoder_tokens,
            positions=positions,
            dtype=dtype,
            device=device,
            weight_bytes=weight_bytes,
            picture=picture,
            command=command,
            progress=progress,
        )


def _measure(
    subject: Subject,
    planned: Sequence[PlannedVersion],
    options: BenchmarkOptions,
    *,
    context: Sequence[int],
    encoder_tokens: int | None,
    positions: int | None,
    dtype: str,
    device: Any,
    weight_bytes: dict[KVHeads, int],
    picture: Path | None,
    command: list[str] | None,
    progress: Progress,
) -> BenchmarkFile:
    import torch

    from gqa_convert.measuring.benchmark.cells import Cell, measure_cell
    from gqa_convert.measuring.benchmark.memory import check_room

    progress("building models", 0, 1)
    versions, own, used = _versions(subject, planned, options.attention, getattr(torch, dtype), device)
    progress("building models", 1, 1)
    cells = [Cell(batch, tokens, encoder_tokens) for batch, tokens in itertools.product(options.batch, context)]
    for cell in cells:
        check_room(
            [version.plan for version in versions],
            cell.batch,
            cell.context,
            cell.encoder_tokens,
            available_memory(device),
        )
    results = []
    for number, cell in enumerate(cells):

        def step(done: int, total: int, number: int = number) -> None:
            progress("timing", number * total + done, len(cells) * total)

        for version, record in zip(versions, measure_cell(versions, cell, options, step), strict=True):
            if options.memory is not None:
                from gqa_convert.measuring.benchmark.memory import fitting

                fit = fitting(
                    options.memory,
                    weight_bytes[version.groups],
                    record.kv_bytes_per_token or 0.0,
                    record.cross_kv_bytes_per_encoder_token or 0.0,
                    batch=cell.batch,
                    context=cell.context,
                    encoder_tokens=encoder_tokens or 0,
                    positions=positions,
                )
                record = record.model_copy(update=asdict(fit))
            results.append(record)
        gc.collect()
    plan = planned[-1].plan
    result = BenchmarkFile(
        model=subject.name,
        model_type=plan.family.model_type,
        layers=decoder_layers(versions[0].model.config),
        dtype=dtype,
        heads=plan.heads,
        kv_heads=planned[-1].groups if plan.family.is_layerwise else plan.source_kv_heads,
        weights="own" if own else "random",
        attention=used,
        cache="dynamic, as generate() makes it",
        threads=torch.get_num_threads(),
        order=ORDER,
        steps=options.steps,
        spread="decode_ms_low and decode_ms_high are the quartiles of the repetitions' means",
        results=tuple(results),
        plot=None if picture is None else str(picture),
    ).headed(Head.model_validate(measurement("benchmark", command, str(device)).as_json()))
    if options.memory is not None:
        from gqa_convert.measuring.benchmark.memory import ASSUMED

        result = result.model_copy(update={"memory": MemoryBudget(bytes=options.memory, assumed=ASSUMED)})
    if picture is not None:
        from gqa_convert.measuring.benchmark.plot import draw_times

        draw_times(result, picture)
    return result


def _dtype(subject: Subject, asked: str | None) -> str:
    stated = asked or subject.config.get("dtype") or subject.config.get("torch_dtype") or "float32"
    if stated not in DTYPES:
        raise OptionError(f"{subject.name} states the type {stated!r}: choose one of {', '.join(DTYPES)} with --dtype")
    return str(stated)


def _versions(
    subject: Subject, planned: Sequence[PlannedVersion], asked: str | None, dtype: Any, device: Any
) -> tuple[list[Version], bool, str]:
    """The versions, whether one has the source's weights, and their attention function, the first that the model
    accepts.
    """
    from gqa_convert.attention import register
    from gqa_convert.measuring.benchmark.kernels import running_attention

    register()
    *preferred, last = (asked,) if asked else ATTENTIONS
    for attention in preferred:
        with suppress(UnknownAttentionError):
            versions, own = make_versions(subject, planned, attention, dtype, device)
            return versions, own, running_attention(versions, asked=asked)
    versions, own = make_versions(subject, planned, last, dtype, device)
    return versions, own, running_attention(versions, asked=asked)


def _lengths(subject: Subject, options: BenchmarkOptions) -> tuple[list[int], int | None, int | None]:
    """Contexts, the number of encoder tokens (None without an encoder) and of the decoder's positions (None for any)."""
    config = transformers_config(subject.config, subject.name)
    positions = stated_positions(config.to_dict())
    steps = LEAD + options.steps
    context = options.context or (CONTEXT if positions is None or positions >= 2 * CONTEXT else max(1, positions // 2),)
    if positions is not None and max(context) + steps > positions:
        raise OptionError(
            f"--context {max(context)}: the model has {positions} positions, and {steps} decode steps follow: give at most {positions - steps}"
        )
    if not config.is_encoder_decoder:
        if options.encoder_tokens is not None:
            raise OptionError(
                f"--encoder-tokens {options.encoder_tokens}: a {config.model_type} has no encoder: leave it out"
            )
        return list(dict.fromkeys(context)), None, positions
    made_for = getattr(config, "max_source_positions", None)
    if isinstance(made_for, int):
        if options.encoder_tokens not in (None, made_for):
            raise OptionError(
                f"--encoder-tokens {options.encoder_tokens}: this encoder always gives {made_for}: leave it out"
            )
        return list(dict.fromkeys(context)), made_for, positions
    encoder_tokens = options.encoder_tokens or min(CONTEXT, positions or CONTEXT)
    if positions is not None and encoder_tokens > positions:
        raise OptionError(f"--encoder-tokens {encoder_tokens}: the model has {positions} positions: give that or fewer")
    return list(dict.fromkeys(context)), encoder_tokens, positions


@contextmanager
def _memory_explained() -> Any:
    try:
        yield
    except Exception as problem:
        if not is_out_of_memory(problem):
            raise
        raise DeviceMemoryError(
            f"the memory does not suffice ({problem}): time fewer --groups, or a smaller --batch or --context"
        ) from None
