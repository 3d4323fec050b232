"""The speed-up of a decode step with fewer K/V heads, timed here or read from a benchmark's file."""

import json
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gqa_convert.checkpoint.devices import chosen_device
from gqa_convert.checkpoint.machine import machine
from gqa_convert.checkpoint.source import CONFIG, Checkpoint
from gqa_convert.conversion.plan import Plan
from gqa_convert.errors import OptionError
from gqa_convert.families.context_length import has_fixed_source, stated_positions
from gqa_convert.measuring.benchmark.options import CONTEXT, LEAD, BenchmarkOptions
from gqa_convert.measuring.benchmark.run import benchmark_model
from gqa_convert.measuring.benchmark.subject import Subject, cut, decoder_layers, transformers_config
from gqa_convert.measuring.recommend.choice import Constraints
from gqa_convert.measuring.results.schemas import BenchmarkFile, TimedCell

_AFFORDABLE: Final = 1 << 30
"""Maximum bytes of weights and caches to time on a CPU, which reads a few GB per second and reads them hundreds of
times.
"""

_UNEVEN: Final = 1.1
"""Ratio of two speeds in the wrong order from which a note is added."""


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed-up of a decode step over the source; `low` and `high` come from the quartiles and are None for an
    estimate.
    """

    speedup: float
    low: float | None
    high: float | None
    milliseconds: float


@dataclass(frozen=True, slots=True)
class Setting:
    """What is timed, and notes where it is less than the user's batch and context."""

    options: BenchmarkOptions
    notes: tuple[str, ...]


def choose_setting(
    checkpoint: Checkpoint, plans: Sequence[Plan], constraints: Constraints, encoder_tokens: int | None
) -> Setting:
    """The layers and the context that this machine can time in minutes.

    Args:
        checkpoint: the source.
        plans: of all N to time; the last has the source's number.
        constraints: batch and context.
        encoder_tokens: of an encoder-decoder's input.

    Raises:
        GQAConvertError: the model can't be timed.
    """
    device = chosen_device(None)
    memory = machine(device).memory_bytes
    room = memory // 2 if device == "cuda" else min(_AFFORDABLE, memory // 4)
    layers = decoder_layers(transformers_config(checkpoint.config, checkpoint.source_id))
    context, notes = constraints.context, []
    positions, steps = stated_positions(checkpoint.config), LEAD + BenchmarkOptions().steps
    if context is not None and positions is not None and context + steps > positions:
        context = max(1, positions - steps)
        notes.append(
            f"timed at a context of {context:,}: the model has {positions:,} positions, and {steps} decode steps follow"
        )
    token = constraints.batch * sum(plan.cache_bytes_per_token(True) for plan in plans)
    crossing = (
        constraints.batch
        * (encoder_tokens or CONTEXT)
        * sum(plan.cache_bytes_per_token(True, "cross") for plan in plans)
    )
    whole = checkpoint.weight_bytes + token * (context or CONTEXT) + crossing
    timed = layers
    if whole > room:
        timed = max(1, min(layers, math.floor(layers * room / whole)))
        try:
            cut(Subject(checkpoint.source_id, checkpoint.config, None), timed)
        except OptionError:
            timed = layers
        else:
            notes.append(f"{timed} of {layers} layers are timed, and the whole model's time is estimated from theirs")
    held = (token * (context or CONTEXT) + crossing) * timed / layers
    if context is not None and held > room:
        shorter = max(1, int(context * room / held))
        notes.append(
            f"timed at a context of {shorter:,} in place of {context:,}, whose caches are too large to time here: at the longer one fewer K/V "
            "heads usually gain more"
        )
        context = shorter
    options = BenchmarkOptions(
        groups=tuple(plan.groups for plan in plans),
        batch=(constraints.batch,),
        context=None if context is None else (context,),
        encoder_tokens=_stated_input(checkpoint, encoder_tokens),
        layers=None if timed == layers else timed,
        prefill=False,
    )
    return Setting(options, tuple(notes))


def _stated_input(checkpoint: Checkpoint, encoder_tokens: int | None) -> int | None:
    """The encoder tokens to state; None for an encoder of a fixed length."""
    return None if has_fixed_source(checkpoint.config) else encoder_tokens


def time_versions(checkpoint: Checkpoint, setting: Setting, progress: Callable[[str, int, int], None]) -> BenchmarkFile:
    """The result of `benchmark --config` for the source's shapes; weights are random, so none are read or downloaded."""
    with tempfile.TemporaryDirectory(prefix="gqa-recommend-") as folder:
        config = Path(folder) / CONFIG
        config.write_text(json.dumps(checkpoint.config), encoding="utf-8")
        return benchmark_model(config=config, options=setting.options, progress=progress)


def speeds(records: Sequence[TimedCell], own: int) -> dict[int, Speed]:
    """The speed-up by N at one batch and context of a benchmark, without models whose layers differ.

    Args:
        records: results at that batch and context; estimates of the whole model take precedence over times of some
            layers.
        own: number of K/V heads of the source; without a time for it there is no speed-up.
    """
    by_groups = {each.groups: each for each in records if isinstance(each.groups, int)}
    times = {
        groups: each.estimated_decode_ms_per_token or each.decode_ms_per_token for groups, each in by_groups.items()
    }
    base = times.get(own)
    found = {}
    for groups, each in by_groups.items():
        time, low, high = times[groups], each.decode_ms_low, each.decode_ms_high
        if not base or not time:
            continue
        estimated = each.estimated_decode_ms_per_token is not None
        known = low and high and not estimated
        found[groups] = Speed(
            base / time, base / high if known and high else None, base / low if known and low else None, time
        )
    return found


def uneven(found: dict[int, Speed]) -> str | None:
    """A note if fewer K/V heads are slower by more than a tenth, which only a disturbed measurement explains."""
    counts = sorted(found)
    pairs = ((few, many) for place, few in enumerate(counts) for many in counts[place + 1 :])
    few, many = max(pairs, key=lambda pair: found[pair[1]].speedup / found[pair[0]].speedup, default=(0, 0))
    if not few or found[many].speedup <= _UNEVEN * found[few].speedup:
        return None
    return (
        f"N = {few} was timed at {found[few].speedup:.3g}x and N = {many} at {found[many].speedup:.3g}x: the machine was busy, or the model and "
        "its cache are too small for N to matter; run benchmark --repetitions 50 --json on an idle one, and give its file to --results"
    )
