"""Carries out what `convert` was asked for."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gqa_convert.conversion.options import CalibrationOptions, ConversionOptions
    from gqa_convert.conversion.plan import Plan
    from gqa_convert.conversion.run import ConversionResult
    from gqa_convert.measuring.sensitivity.kv_budget import BudgetChoice, KVBudget


def choose_groups(source: str, budget: "KVBudget", options: "ConversionOptions", *, out: Path | None) -> "BudgetChoice":
    """Choose the number of K/V heads of each layer for a budget, and say how on stderr."""
    from gqa_convert.measuring.sensitivity.choosing import choose_num_kv_heads

    from .console.progress import ProgressScreen

    with ProgressScreen() as screen:
        choice = choose_num_kv_heads(source, budget, options, out=out, progress=screen.show)
        if choice.warning:
            screen.say(f"note: {choice.warning}")
        screen.say(
            f"note: --kv-budget {choice.stated} allows {choice.limit_kv_bytes_per_token:,} of the "
            f"{choice.source_kv_bytes_per_token:,} bytes of K/V per token; chosen is {choice.reason}"
        )
    return choice


def convert_source(source: str, out: Path, groups: int | list[int], options: "ConversionOptions") -> "ConversionResult":
    """Convert a checkpoint, and show how far that is."""
    from gqa_convert.conversion.run import convert_checkpoint

    from .console.conversion_progress import ConversionScreen
    from .console.progress import ProgressScreen

    def prove(folder: Path) -> None:
        from gqa_convert.verify.run import prover  # imports torch, which no listed type needs here

        prover(source, options.revision)(folder)

    with ProgressScreen() as progress:
        screen = ConversionScreen(progress)
        return convert_checkpoint(
            source,
            out,
            groups,
            options,
            prove=prove,
            on_plan=screen.plan,
            on_layer=screen.layer,
            progress=screen.written,
        )


def plan_source(
    source: str, groups: int | list[int], options: "ConversionOptions"
) -> tuple["Plan", "CalibrationOptions"]:
    """The plan of a conversion, for which of a Hub id only headers are downloaded."""
    from gqa_convert.checkpoint.source import open_checkpoint
    from gqa_convert.conversion.fit.defaults import plan_conversion
    from gqa_convert.conversion.rewriting.planning import plan_rewriting

    checkpoint = open_checkpoint(source, revision=options.revision)
    return plan_conversion(plan_rewriting(checkpoint, groups, native=options.native), groups, options)
