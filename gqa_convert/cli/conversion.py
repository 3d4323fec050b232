"""Carries out what `convert` was asked for."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gqa_convert.errors import OptionError

from .console.screen import print_json

if TYPE_CHECKING:
    from gqa_convert.conversion.fit.calibrated import CalibrationOptions
    from gqa_convert.measuring.sensitivity.choice import BudgetChoice
    from gqa_convert.measuring.sensitivity.kv_budget import KVBudget


@dataclass(frozen=True, slots=True)
class Conversion:
    """What `convert` was asked for.

    Attributes:
        source, revision: the checkpoint to convert.
        out: the folder to make; None with --dry-run.
        groups: K/V heads per layer of the result, or those of each layer; None with a budget.
        budget: of the K/V cache, for which the numbers are chosen.
        method: as the user named it.
        calibration: the options of calibration.
        plan_options: further options of `plan_conversion`.
        overwrite: replace an earlier result.
        hash_weights: record the hashes of the weights.
        command: the command line, for the record.
    """

    source: str
    revision: str | None
    out: Path | None
    groups: int | list[int] | None
    budget: "KVBudget | None"
    method: str | None
    calibration: "CalibrationOptions"
    plan_options: dict[str, Any]
    overwrite: bool
    hash_weights: bool
    command: list[str]


def convert_source(wanted: Conversion, *, as_json: bool, quiet: bool) -> None:
    """Convert a checkpoint and print the result."""
    from gqa_convert.conversion.run import convert_checkpoint

    from .console.budget import note_choice
    from .console.conversion import show_conversion
    from .console.conversion_progress import ConversionScreen
    from .console.progress import progress_screen

    assert wanted.out is not None
    groups, choice = _numbers(wanted, quiet)
    if choice is not None and not quiet:
        note_choice(choice)
    with progress_screen(quiet=quiet) as progress:
        screen = ConversionScreen(progress)
        result = convert_checkpoint(
            wanted.source,
            wanted.out,
            groups,
            method=wanted.method,
            calibration=wanted.calibration,
            revision=wanted.revision,
            overwrite=wanted.overwrite,
            hash_weights=wanted.hash_weights,
            command=wanted.command,
            on_plan=lambda plan: screen.will_write(plan.weight_bytes_after),
            on_note=screen.note,
            on_layer=screen.layer,
            progress=screen.written,
            **wanted.plan_options,
        )
    if as_json:
        print_json(result.as_json() | _chosen(choice))
    elif not quiet:
        show_conversion(result, last_stage_refused=wanted.calibration.kl_steps == 0)


def show_dry_run(wanted: Conversion, context: int | None, batch: int, *, as_json: bool, quiet: bool) -> None:
    """Plan a conversion and print what it would do; nothing is written, and of a Hub id only headers are downloaded.

    Args:
        wanted: the conversion.
        context: tokens for which the K/V cache is shown; None for the model's context.
        batch: sequences in the K/V cache.
        as_json: print one JSON object.
        quiet: print nothing else.
    """
    from gqa_convert.checkpoint.source import open_checkpoint
    from gqa_convert.conversion.fit.defaults import plan_conversion
    from gqa_convert.conversion.fit.needs import estimate_needs
    from gqa_convert.conversion.restating.restate import NEEDED

    from .console.budget import note_choice
    from .console.plan import caches_at_context, show_plan

    groups, choice = _numbers(wanted, quiet)
    try:
        checkpoint = open_checkpoint(wanted.source, revision=wanted.revision)
        plan, text = plan_conversion(checkpoint, groups, wanted.method, wanted.calibration, **wanted.plan_options)
    except NEEDED as problem:
        raise OptionError(f"--dry-run cannot plan a source that convert rewrites first: {problem}") from None
    needs, caches = estimate_needs(plan, text), caches_at_context(plan, context, batch)
    if as_json:
        print_json(plan.summary() | caches | {"estimate": needs.as_json()} | _chosen(choice))
    elif not quiet:
        if choice is not None:
            note_choice(choice)
        show_plan(plan, needs, caches)


def _numbers(wanted: Conversion, quiet: bool) -> tuple[int | list[int], "BudgetChoice | None"]:
    """Return the numbers of K/V heads of the result, and with a budget how they were chosen."""
    if wanted.budget is None:
        assert wanted.groups is not None
        return wanted.groups, None
    from gqa_convert.measuring.sensitivity.choosing import choose_num_kv_heads

    from .console.progress import stage_progress

    with stage_progress(quiet=quiet) as progress:
        choice = choose_num_kv_heads(
            wanted.source,
            wanted.budget,
            wanted.calibration,
            out=wanted.out,
            method=wanted.method,
            revision=wanted.revision,
            overwrite=wanted.overwrite,
            progress=progress,
            **wanted.plan_options,
        )
    return choice.groups, choice


def _chosen(choice: "BudgetChoice | None") -> dict[str, Any]:
    return {} if choice is None else {"budget": choice.as_json()}
