"""Opens the source of a conversion. A GGUF file is planned by its header, and dequantised while it is converted."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.gguf_files import GGUFModel, GGUFSourceError, locate_gguf
from gqa_convert.checkpoint.publication import check_destination, sweep
from gqa_convert.checkpoint.source import Checkpoint, open_checkpoint, open_local
from gqa_convert.conversion.fit.calibrated import CalibrationOptions
from gqa_convert.conversion.fit.defaults import plan_conversion
from gqa_convert.conversion.plan import Plan
from gqa_convert.families.dequantised_source import (
    check_space,
    dequantised,
    describe_gguf,
    describe_needs,
)

Note = Callable[[str], None]
Planner = Callable[[Checkpoint], tuple[Plan, CalibrationOptions]]


def plan_source(source: str | Path, revision: str | None, planner: Planner) -> tuple[Plan, CalibrationOptions]:
    """The plan of a source of which nothing is downloaded but headers, except for a GGUF file on the Hub.

    Args:
        source: a local folder, a Hub id or a GGUF file.
        revision: branch, tag or commit on the Hub.
        planner: makes the plan of an opened checkpoint.

    Raises:
        GQAConvertError: one of its subclasses for every mistake.
    """
    try:
        return planner(open_checkpoint(source, revision=revision))
    except GGUFSourceError as found:
        gguf = locate_gguf(found, revision)
    plan, text = _plan_gguf(gguf, planner)
    needs = describe_needs(gguf, Path("OUT"))
    return replace(plan, warnings=(describe_gguf(gguf), needs, *plan.warnings)), text


def open_source(
    source: str | Path,
    revision: str | None,
    out: Path,
    planner: Planner,
    stack: ExitStack,
    *,
    overwrite: bool,
    note: Note,
) -> Checkpoint:
    """Open a source for a conversion, as a local checkpoint.

    Args:
        source: a local folder, a Hub id or a GGUF file.
        revision: branch, tag or commit on the Hub.
        out: the result; of a GGUF file, the dequantised weights lie beside it until `stack` is closed.
        planner: makes the plan of a checkpoint whose headers alone are known, before the work; an exception prevents it.
        stack: closed once the result is written.
        overwrite: whether `out` may be an earlier result.
        note: called with sentences about a GGUF file, before the work.

    Raises:
        GQAConvertError: one of its subclasses for every mistake; nothing is left behind then.
    """
    try:
        return open_local(source, revision, planner)
    except GGUFSourceError as found:
        gguf = locate_gguf(found, revision)
    plan, _ = _plan_gguf(gguf, planner)
    check_destination(out, None, overwrite=overwrite)
    check_space(gguf, out, plan.disk_bytes)
    note(describe_gguf(gguf))
    note(describe_needs(gguf, out))
    sweep(out.absolute().parent)
    return stack.enter_context(dequantised(gguf, out, note))


def _plan_gguf(gguf: GGUFModel, planner: Planner) -> tuple[Plan, CalibrationOptions]:
    from gqa_convert.families.dequantising import outline_gguf

    return planner(outline_gguf(gguf))


def planner_for(groups: Any, method: str | None, text: CalibrationOptions, **options: Any) -> Planner:
    """What makes the plan of a conversion; the arguments are those of `plan_conversion`."""
    return lambda checkpoint: plan_conversion(checkpoint, groups, method, text, **options)
