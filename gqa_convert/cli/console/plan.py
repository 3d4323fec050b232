"""A plan, and what a conversion came to."""

import shlex
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .screen import size, stdout_console, styled

if TYPE_CHECKING:
    from gqa_convert.conversion.plan import Plan

CACHES = {
    "kv_bytes_per_token": "K/V cache per token",
    "cross_kv_bytes_per_encoder_token": "cross cache per encoder token",
}
"""What a plan's figures of caches are called."""


def show_plan(plan: "Plan") -> None:
    """The plan as tables: what changes per layer, then what it brings."""
    from rich.table import Table

    from gqa_convert.families.engines import ENGINES

    console = stdout_console()
    console.print(
        styled(
            (plan.checkpoint.source_id, "bold"),
            f": {plan.family.model_type}, {plan.heads} query heads, {plan.source_kv_heads} -> ",
            (str(plan.groups), "bold"),
            f" K/V heads in {len(plan.layers)} attention layers",
        ),
        soft_wrap=True,
    )
    changes = Table("layers", "tensor", "before", "after", "type", "method", title="What changes", title_justify="left")
    for layers, tensor, before, after, dtype, method in _runs_of_layers(plan):
        changes.add_row(layers, tensor, before, after, dtype, method)
    console.print(changes)
    totals = Table("", "before", "after", "ratio", title="Savings", title_justify="left")
    rows: list[tuple[str, int, int, Callable[[float], str]]] = [
        ("parameters", plan.parameters_before, plan.parameters_after, lambda n: f"{n:,}"),
        ("weights", plan.checkpoint.weight_bytes, plan.weight_bytes_after, size),
    ]
    rows += [(CACHES[key], both["before"], both["after"], size) for key, both in plan.cache_bytes().items()]
    for label, was, becomes, shown in rows:
        totals.add_row(label, shown(was), shown(becomes), f"{becomes / was:.3f}")
    console.print(totals)
    split, copied = plan.tensor_parallel_degrees()
    console.print(f"disk needed:      {size(plan.disk_bytes)}")
    console.print(f"loads as it is:   {', '.join(f'{engine} {_loads(plan, engine)}' for engine in ENGINES)}")
    if plan.target_architecture:
        console.print(
            f"route:            translated to {plan.target_architecture.model_type}, a stock class that computes the same (--no-native: keep {plan.family.model_type})"
        )
    if plan.modeling:
        console.print(
            f"loads with code:  transformers 5, trust_remote_code=True, by {plan.modeling.file}.py, which is written beside it"
        )
    degrees = ", ".join(map(str, split))
    if copied:
        degrees += f"; with copied K/V heads (vLLM) also {', '.join(map(str, copied))}"
    console.print(f"tensor parallel:  {degrees}")
    for warning in plan.warnings:
        console.print(styled(("note:", "yellow"), f" {warning}"), soft_wrap=True)


def _loads(plan: "Plan", engine: str) -> str:
    from gqa_convert.families.engines import same_up_to

    if engine in plan.listed_in:
        return "by its list"
    if engine not in plan.loads_in:
        return "no" if plan.modeling else "not known to"
    tokens = same_up_to(engine, plan.config)
    return f"yes, up to {tokens:,} tokens" if tokens else "yes"


def _runs_of_layers(plan: "Plan") -> Iterator[tuple[str, str, str, str, str, str]]:
    """Rows of the plan's table; layers in which the same tensor changes in the same way share a row."""
    rows: dict[tuple[str, str, str, str, str], list[str]] = {}
    for change in plan.changes:
        number = next((part for part in change.module.split(".") if part.isdigit()), "-")
        tensor = change.name.removeprefix(change.module.rsplit(".", 1)[0] + ".")
        key = (tensor, str(list(change.before)), str(list(change.after)), change.dtype, change.method)
        rows.setdefault(key, []).append(number)
    for key, numbers in rows.items():
        yield (_ranges(numbers), *key)


def _ranges(numbers: list[str]) -> str:
    """["0", "1", "2", "5"] -> "0-2, 5"."""
    if not all(number.isdigit() for number in numbers):
        return ", ".join(numbers)
    ordered = sorted(map(int, numbers))
    runs: list[list[int]] = []
    for number in ordered:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def show_conversion(result: dict[str, Any]) -> None:
    """The one summary at the end of a conversion."""
    console = stdout_console()
    console.print(
        styled(
            ("done", "green"),
            f"  {result['source_kv_heads']} -> {result['groups']} K/V heads ({result['method']}) in {result['attention_layers']} layers, "
            f"{len(result['changes'])} tensors changed",
        )
    )
    sizes = [(CACHES[key], result[key]) for key in CACHES if key in result] + [("weights", result["weight_bytes"])]
    rows = [(label, f"{size(both['before'])} -> {size(both['after'])}") for label, both in sizes]
    rows.append(("where", result["out"]))
    if result["modeling_file"]:
        rows.append(
            (
                "load it",
                f"from_pretrained(..., trust_remote_code=True), by {result['modeling_file']} beside the weights",
            )
        )
    rows.append(("next", shlex.join(["gqa-convert", "verify", result["out"], "--source", result["source"]])))
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        console.print(f"      {label:<{width}}  {text}", soft_wrap=True)
