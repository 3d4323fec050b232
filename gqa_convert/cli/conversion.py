"""Carries out what `convert` was asked for."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gqa_convert.errors import OptionError

from .console.screen import print_json

if TYPE_CHECKING:
    from gqa_convert.measuring.sensitivity.choice import BudgetChoice
    from gqa_convert.measuring.sensitivity.kv_budget import KVBudget


def choose_groups(source: str, budget: "KVBudget", *, calibration: Any, quiet: bool, **options: Any) -> "BudgetChoice":
    """Choose the number of K/V heads of each layer for a budget, and say how on stderr."""
    from gqa_convert.measuring.sensitivity.choosing import choose_num_kv_heads

    from .console.progress import ProgressScreen

    with ProgressScreen(quiet=quiet) as screen:
        choice = choose_num_kv_heads(source, budget, calibration, progress=screen.show, **options)
        if choice.warning:
            screen.say(f"note: {choice.warning}")
        screen.say(
            f"note: --kv-budget {choice.stated} allows {choice.limit_kv_bytes_per_token:,} of the "
            f"{choice.source_kv_bytes_per_token:,} bytes of K/V per token; chosen is {choice.reason}"
        )
    return choice


def convert_source(
    source: str,
    out: Path,
    groups: int | list[int],
    *,
    chosen: dict[str, Any],
    as_json: bool,
    quiet: bool,
    calibration: Any,
    **options: Any,
) -> None:
    """Convert a checkpoint and print the result; `chosen` joins its JSON."""
    from gqa_convert.conversion.run import convert_checkpoint

    from .console.conversion import show_conversion
    from .console.conversion_progress import ConversionScreen
    from .console.progress import ProgressScreen

    with ProgressScreen(quiet=quiet) as progress:
        screen = ConversionScreen(progress)
        result = convert_checkpoint(
            source,
            out,
            groups,
            calibration=calibration,
            on_plan=screen.plan,
            on_note=screen.note,
            on_layer=screen.layer,
            progress=screen.written,
            **options,
        )
    if as_json:
        print_json(result.as_json() | chosen)
    elif not quiet:
        show_conversion(result, last_stage_refused=calibration.kl_steps == 0)


def show_dry_run(
    source: str,
    groups: int | list[int],
    *,
    chosen: dict[str, Any],
    context: int | None,
    batch: int,
    as_json: bool,
    quiet: bool,
    revision: str | None,
    method: str | None,
    calibration: Any,
    **options: Any,
) -> None:
    """Plan a conversion and print what it would do; nothing is written, and of a Hub id only headers are downloaded."""
    from gqa_convert.checkpoint.source import open_checkpoint
    from gqa_convert.conversion.fit.defaults import plan_conversion
    from gqa_convert.conversion.fit.memory import estimate_needs
    from gqa_convert.conversion.restating.restate import NEEDED

    from .console.plan import caches_at_context, show_plan

    try:
        checkpoint = open_checkpoint(source, revision=revision)
        plan, text = plan_conversion(checkpoint, groups, method, calibration, **options)
    except NEEDED as problem:
        raise OptionError(f"--dry-run cannot plan a source that convert rewrites first: {problem}") from None
    needs, caches = estimate_needs(plan, text), caches_at_context(plan, context, batch)
    if as_json:
        print_json(plan.summary() | caches | {"estimate": needs.as_json()} | chosen)
    elif not quiet:
        show_plan(plan, needs, caches)
