"""The printed form of a plan."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from gqa_convert.checkpoint.byte_sizes import size

from .screen import print_note, stdout_console, styled
from .tables import Column, show_table

if TYPE_CHECKING:
    from gqa_convert.conversion.fit.needs import Needs
    from gqa_convert.conversion.plan import Plan

CACHES = {
    "kv_bytes_per_token": "K/V cache per token",
    "cross_kv_bytes_per_encoder_token": "cross cache per encoder token",
}
"""Labels of a plan's cache sizes."""

_LONG_CONTEXT = 32_768
"""Tokens of the second context for which the cache is shown."""


def show_plan(plan: "Plan") -> None:
    """Print what changes in every layer, what the conversion saves, and what loads the result."""
    console = stdout_console()
    console.print(
        styled(
            (plan.checkpoint.source_id, "bold"),
            f": {plan.family.model_type}, {plan.heads} query heads, {heads_before(plan)} -> ",
            (heads_after(plan), "bold"),
            f" K/V heads in {len(plan.layers)} attention layers",
        ),
        soft_wrap=True,
    )
    if plan.effective_method == "copy" and not plan.target_architecture:
        console.print(
            f"No tensor changes: the source has {heads_after(plan)} K/V heads already, and convert copies its weights.",
            soft_wrap=True,
        )
    else:
        columns = ["layers", "tensor", "before", "after", "type", "method"]
        show_table(columns, list(_runs_of_layers(plan)), title="Changes")
    show_table(
        ["", *(Column(heading, "right") for heading in ("before", "after", "ratio"))], _savings(plan), title="Savings"
    )
    for label, text in _facts(plan):
        console.print(f"{label + ':':<17} {text}", soft_wrap=True)
    for warning in plan.warnings:
        print_note(warning)


def show_needs(needs: "Needs") -> None:
    """Print the estimated memory and disk space."""
    count = needs.device.count(",") + 1
    place = "" if needs.device.startswith("cpu") else " of the GPU" if count == 1 else " of each GPU"
    divided = f" on {count} devices" if count > 1 else ""
    memory = needs.memory_bytes
    rounded = f"{memory / 2**30:.1f} GiB" if memory >= 2**30 else f"{memory / 2**20:.0f} MiB"
    stdout_console().print(
        f"Estimate: {rounded} of memory{place}, {size(needs.disk_bytes)} of disk ({needs.work}{divided})",
        soft_wrap=True,
    )


def heads_after(plan: "Plan") -> str:
    """Return the K/V heads of the result's layers: "4", or "2 to 8" where layers differ."""
    return _span(plan.layer_groups)


def heads_before(plan: "Plan") -> str:
    """Return the K/V heads of the source's layers in the same way."""
    by_layer = plan.family.is_layerwise
    return _span([layer.kv_heads for layer in plan.layers]) if by_layer else str(plan.source_kv_heads)


def _span(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return str(most) if least == most else f"{least} to {most}"


def _savings(plan: "Plan") -> list[list[str]]:
    """Return the rows of parameters, weights and cache sizes before and after the conversion."""
    rows = [_row("parameters", plan.parameters_before, plan.parameters_after, "{:,}".format)]
    rows.append(_row("weights", plan.checkpoint.weight_bytes, plan.weight_bytes_after, size))
    caches = plan.cache_bytes()
    rows += [_row(CACHES[key], both.before, both.after, size) for key, both in caches.items()]
    if own := caches.get("kv_bytes_per_token"):
        for tokens in _contexts(plan):
            rows.append(_row(f"K/V cache at {tokens:,} tokens", own.before * tokens, own.after * tokens, size))
    if cross := caches.get("cross_kv_bytes_per_encoder_token"):
        for tokens in _encoder_contexts(plan):
            label = f"cross cache at {tokens:,} encoder tokens"
            rows.append(_row(label, cross.before * tokens, cross.after * tokens, size))
    return rows


def _row(label: str, before: int, after: int, form: "Callable[[int], str]") -> list[str]:
    return [label, form(before), form(after), f"{after / before:.3f}"]


def _contexts(plan: "Plan") -> list[int]:
    """Return the model's context in tokens, if its config states one, and a long context; none with sliding windows.

    Layers with sliding windows keep fewer tokens, so that the size per token does not give the size of a context.
    """
    from gqa_convert.families.context_length import stated_positions
    from gqa_convert.families.windows import has_window

    if has_window(plan.config):
        return []
    return sorted({stated_positions(plan.checkpoint.config) or _LONG_CONTEXT, _LONG_CONTEXT})


def _encoder_contexts(plan: "Plan") -> list[int]:
    """Return the encoder's context in tokens, if the config states one, and a long context where texts may be as long;
    none if the encoder reads images, whose tokens the config does not count.
    """
    from gqa_convert.families.context_length import has_fixed_source, stated_encoder_positions

    config = plan.checkpoint.config
    if plan.family.reads_images_alone:
        return []
    stated = stated_encoder_positions(config) or _LONG_CONTEXT
    return [stated] if has_fixed_source(config) else sorted({stated, _LONG_CONTEXT})


def _facts(plan: "Plan") -> Iterator[tuple[str, str]]:
    """Yield the labelled lines below the tables."""
    from gqa_convert.families.engines import ENGINES

    yield "disk needed", size(plan.disk_bytes)
    if plan.modeling:
        yield (
            "loads in",
            f"transformers 5 with trust_remote_code=True, by the file {plan.modeling.file}.py beside the weights; {_others(plan)}",
        )
    else:
        yield "loads in", ", ".join(f"{engine} {_loads(plan, engine)}" for engine in ENGINES)
    if plan.target_architecture:
        yield (
            "translated to",
            f"{plan.target_architecture.model_type}, a stock class that computes the same (--no-native keeps {plan.family.model_type})",
        )
    yield "tensor parallel", plan.tensor_parallel_degrees().in_words()


def _others(plan: "Plan") -> str:
    """Return what is known of other engines and a result with a modelling file."""
    from gqa_convert.families.engines import ENGINES

    known = [engine for engine in ENGINES[1:] if engine in plan.loads_in]
    if known:
        return f"{' and '.join(known)} {'have' if len(known) > 1 else 'has'} code for the type"
    listed = [engine for engine in ENGINES[1:] if engine in plan.listed_in]
    if listed:
        return f"{' and '.join(listed)} list the type (untested)"
    return f"not in {' or '.join(ENGINES[1:])}"


def _loads(plan: "Plan", engine: str) -> str:
    """Return whether an engine loads the result, for a plan without a modelling file."""
    from gqa_convert.families.engines import same_up_to

    if engine in plan.listed_in:
        return "untested (it lists the type)"
    if engine not in plan.loads_in:
        return "not known"
    tokens = same_up_to(engine, plan.config)
    return f"yes, up to {tokens:,} tokens" if tokens else "yes"


def _runs_of_layers(plan: "Plan") -> Iterator[tuple[str, str, str, str, str, str]]:
    """Yield the rows of changed tensors; layers in which the same tensor changes in the same way share a row."""
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
