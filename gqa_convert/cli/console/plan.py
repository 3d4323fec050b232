"""The printed form of a plan."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gqa_convert.checkpoint.byte_sizes import size
from gqa_convert.families.context_length import stated_encoder_positions, stated_positions
from gqa_convert.families.engines import ENGINES, same_up_to

from .screen import print_note, stdout_console, styled, tokens_text
from .tables import show_table

if TYPE_CHECKING:
    from gqa_convert.conversion.fit.memory import Needs
    from gqa_convert.conversion.plan import Plan

CACHES = {
    "kv_bytes_per_token": "K/V cache per token",
    "cross_kv_bytes_per_encoder_token": "cross cache per encoder token",
}
"""Labels of a plan's cache sizes."""

MODELING = "transformers 5 with trust_remote_code=True, by the file {}.py beside the weights"
"""What loads a result that has a modelling file."""

_LONG_CONTEXT = 32_768
"""Tokens for which the cache is shown where the config states no context."""


def caches_at_context(plan: "Plan", context: int | None, batch: int) -> dict[str, Any]:
    """Return the sizes of the caches for --json, in bytes.

    Args:
        plan: of the conversion.
        context: tokens of each sequence; None for as many as the model has positions for.
        batch: the number of sequences.
    """
    config = plan.checkpoint.config
    tokens = context or stated_positions(config) or _LONG_CONTEXT
    own, cross = plan.kv_cache_bytes(tokens=tokens), plan.kv_cache_bytes("cross")
    caches = {"kv_cache": (tokens, own.before, own.after)}
    if not plan.family.reads_images_alone:  # the config does not count the tokens of an image
        tokens = stated_encoder_positions(config) or _LONG_CONTEXT
        caches["cross_kv_cache"] = (tokens, tokens * cross.before, tokens * cross.after)
    found = {}
    for name, (tokens, before, after) in caches.items():
        if before:
            found[name] = {"tokens": tokens, "batch": batch, "before": batch * before, "after": batch * after}
    return found


def show_plan(plan: "Plan", needs: "Needs", caches: dict[str, Any], sound: dict[str, Any]) -> None:
    """Print what changes in every layer, what the conversion saves, what loads the result, and what it takes to make it.

    Args:
        plan: of the conversion.
        needs: its memory and disk space.
        caches: what `caches_at_context` returned.
        sound: the number of files of sound and their hours, empty for text.
    """
    console = stdout_console()
    heads = f"{plan.heads} query heads, {heads_before(plan)} -> {heads_after(plan)} K/V heads"
    about = f": {plan.family.model_type}, {heads} in {len(plan.layers)} attention layers"
    console.print(styled((plan.checkpoint.source_id, "bold"), about))
    if plan.effective_method == "copy":
        console.print(f"No tensor changes: the source has {heads_after(plan)} K/V heads already.")
    else:
        show_table(_changes(plan), title="Changes", justify="left")
    show_table(_savings(plan, caches), title="Savings")
    for label, text in _facts(plan, needs):
        console.print(f"{label:<17} {text}")
    if sound:
        console.print("sound:            {calibration_files} files, {calibration_hours} hours".format(**sound))
    for warning in plan.warnings:
        print_note(warning)


def heads_after(plan: "Plan") -> str:
    """Return the K/V heads of the result's layers: "4", or "2 to 8" where layers differ."""
    return _span([*plan.layer_groups.values()])


def heads_before(plan: "Plan") -> str:
    """Return the K/V heads of the source's layers in the same way."""
    return _span([layer.kv_heads for layer in plan.layers])


def _span(counts: Sequence[int], to: str = " to ") -> str:
    return to.join(map(str, sorted({min(counts), max(counts)})))


def _changes(plan: "Plan") -> list[dict[str, str]]:
    """The rows of changed tensors; layers in which the same tensor changes in the same way share a row."""
    layers: dict[tuple[str, ...], set[int]] = {}
    for change in plan.changes:
        ((number, tensor),) = re.findall(r"^.*?\b(\d+)\.(.+)", change.name)
        after = change.entry
        cells = (tensor, str(list(change.before)), str(list(after.shape)), after.dtype, change.method)
        layers.setdefault(cells, set()).add(int(number))
    columns = ("layers", "tensor", "before", "after", "type", "method")
    return [dict(zip(columns, (_ranges(numbers), *cells), strict=True)) for cells, numbers in layers.items()]


def _ranges(numbers: set[int]) -> str:
    """{0, 1, 2, 5} -> "0-2, 5"."""
    first = sorted(number for number in numbers if number - 1 not in numbers)
    last = sorted(number for number in numbers if number + 1 not in numbers)
    return ", ".join(_span(ends, "-") for ends in zip(first, last, strict=True))


def _savings(plan: "Plan", caches: dict[str, Any]) -> list[dict[str, str]]:
    """The rows of parameters, weights and cache sizes before and after the conversion."""
    rows = [
        _saving("parameters", plan.parameters_before, plan.parameters_after, "{:,}".format),
        _saving("weights", plan.checkpoint.weight_bytes, plan.weight_bytes_after),
    ]
    for key, both in plan.cache_bytes().items():
        rows.append(_saving(CACHES[key], both.before, both.after))
    for key, cache in caches.items():
        name = "cross cache" if key == "cross_kv_cache" else "K/V cache"
        label = f"{name} at {tokens_text(cache['tokens'])} tokens, batch {cache['batch']}"
        rows.append(_saving(label, cache["before"], cache["after"]))
    return rows


def _saving(label: str, before: int, after: int, text: Callable[[int], str] = size) -> dict[str, str]:
    return {"": label, "before": text(before), "after": text(after), "ratio": f"{after / before:.3f}"}


def _facts(plan: "Plan", needs: "Needs") -> Iterator[tuple[str, str]]:
    """Yield the labelled lines below the tables."""
    if plan.rewritten_from:
        where = "while it is read"
        if needs.rewritten_bytes:
            where = f"into a folder beside OUT, {size(needs.rewritten_bytes)} of disk"
        yield "rewritten first:", f"{plan.rewritten_from} as {plan.family.model_type}, {where}"
    loads = ", ".join(f"{engine} {_loads(plan, engine)}" for engine in ENGINES)
    yield "loads in:", MODELING.format(plan.modeling.file) if plan.modeling else loads
    yield "tensor parallel:", ", ".join(map(str, plan.tensor_parallel_degrees()))
    memory, disk = needs.memory_bytes / 2**30, size(needs.disk_bytes)
    yield "needs:", f"about {memory:.1f} GiB of memory on {needs.device}, {disk} of disk ({needs.work})"


def _loads(plan: "Plan", engine: str) -> str:
    """Whether an engine loads the result, for a plan without a modelling file."""
    if engine in plan.listed_in:
        return "untested (it lists the type)"
    if engine not in plan.loads_in:
        return "not known"
    tokens = same_up_to(engine, plan.config)
    if tokens is None:
        return "yes"
    return f"yes, up to {tokens_text(tokens)} tokens"
