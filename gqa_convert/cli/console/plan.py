"""The printed form of a plan."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from tempfile import gettempdir
from typing import Any

from gqa_convert.checkpoint.provenance import BeforeAfter
from gqa_convert.conversion.estimate import Needs
from gqa_convert.conversion.plan import Plan
from gqa_convert.families.context_length import ENCODER_POSITIONS, intended_length
from gqa_convert.families.engines import LOADERS, same_up_to
from gqa_convert.families.layerwise import heads_text
from gqa_convert.runtime.json_objects import JsonObject
from gqa_convert.runtime.messages import about, size

from .screen import print_note, say, show_table

CACHES = {
    "kv_bytes_per_token": "K/V cache per token",
    "cross_kv_bytes_per_encoder_token": "cross cache per encoder token",
    "kv_cache": "K/V cache",
    "cross_kv_cache": "cross cache",
}
"""Labels of a plan's cache sizes."""

Row = dict[str, str]
"""Cells of a table by the headings of their columns."""

_LONG_CONTEXT = 32_768
"""Tokens for which the cache is shown where the config states no context."""


def caches_at_context(plan: Plan) -> JsonObject:
    """Return the sizes of the caches for --json, in bytes: of a text, and of an encoder's output,
    with as many tokens as the model has positions for.
    """
    config = plan.checkpoint.config
    tokens = intended_length(config) or _LONG_CONTEXT
    found = {"kv_cache": _at(tokens, plan.kv_cache_bytes(tokens=tokens))}
    cross = plan.kv_cache_bytes("cross")
    # the config does not count the tokens of an image
    if cross.before and not plan.family.reads_images_alone:
        tokens = intended_length(config, ENCODER_POSITIONS) or _LONG_CONTEXT
        found["cross_kv_cache"] = _at(
            tokens, BeforeAfter(tokens * cross.before, tokens * cross.after)
        )
    return found


def _at(tokens: int, both: BeforeAfter) -> JsonObject:
    return {"tokens": tokens, "before": both.before, "after": both.after}


def show_plan(plan: Plan, needs: Needs, caches: JsonObject) -> None:
    """Print what changes, what the conversion saves, what loads the result, and what it takes to
    make it.

    Args:
        plan: of the conversion.
        needs: its memory and disk space.
        caches: what `caches_at_context` returned.
    """
    model_type = plan.family.model_type
    say(
        f"{plan.checkpoint.source_id}: {model_type}, {plan.heads} query heads, "
        f"{heads_change(plan)} in {len(plan.layers)} attention layers"
    )
    if plan.changes:
        show_table("Changes", _changes(plan), justify="left")
    show_table("Sizes", _savings(plan, caches))
    if plan.rewritten_from:
        say(f"rewritten first:  {plan.rewritten_from} as {model_type}")
    say(f"loads in:         {loaded_by(plan)}")
    say(f"method:           {needs.work}")
    memory = f"about {size(needs.memory_bytes)} of memory on {needs.device}"
    if needs.offloaded_bytes:
        memory += (
            f" (at least {size(needs.least_memory_bytes)}, with {size(needs.offloaded_bytes)} in "
            f"{gettempdir()})"
        )
    say(f"needs:            {memory}, {size(needs.disk_bytes)} of disk")
    if needs.hours is not None:
        say(f"takes:            {about(needs.hours)} on {needs.device}, by the products it makes")
    print_notes(plan, needs.left_out)


def print_notes(plan: Plan, left_out: Sequence[str]) -> None:
    """Print the warnings of a plan, and which parts of the method are left out."""
    for warning in plan.warnings:
        print_note(warning)
    for sentence in left_out:
        print_note(f"left out: {sentence}")


def heads_change(plan: Plan) -> str:
    """Return the K/V heads of the layers before and after: "12 -> 2 to 8 K/V heads"."""
    before = heads_text([layer.kv_heads for layer in plan.layers])
    return f"{before} -> {heads_text([*plan.layer_kv_heads.values()])} K/V heads"


def _changes(plan: Plan) -> list[Row]:
    """The rows of changed tensors; layers in which the same tensor changes in the same way are
    counted.
    """
    layers: Counter[Any] = Counter()
    for change in plan.changes:
        row = {
            "tensor": re.sub(r"^.*?\b\d+\.", "", change.name),
            "before": str(list(change.before)),
            "after": str(list(change.entry.shape)),
            "type": change.entry.dtype,
            "method": change.method,
        }
        layers[tuple(row.items())] += 1
    return [{**dict(row), "layers": str(count)} for row, count in layers.items()]


def _savings(plan: Plan, caches: JsonObject) -> list[Row]:
    """The rows of parameters, weights and cache sizes before and after the conversion."""
    rows = [
        _saving("parameters", plan.parameters_before, plan.parameters_after, "{:,}".format),
        _saving("weights", plan.checkpoint.weight_bytes, plan.weight_bytes_after),
    ]
    for key, both in plan.cache_bytes().items():
        rows.append(_saving(CACHES[key], both.before, both.after))
    for key, cache in caches.items():
        label = f"{CACHES[key]} at {cache['tokens']:,} tokens"
        rows.append(_saving(label, cache["before"], cache["after"]))
    return rows


def _saving(label: str, before: int, after: int, text: Callable[[int], str] = size) -> Row:
    ratio = f"{after / before:.3f}"
    return {"": label, "before": text(before), "after": text(after), "ratio": ratio}


def loaded_by(plan: Plan) -> str:
    """Say what loads the result."""
    if plan.modeling:
        return (
            "transformers 5 with trust_remote_code=True, by the file "
            f"{plan.modeling.file}.py beside the weights"
        )
    found = []
    for engine in LOADERS:
        tokens = same_up_to(engine, plan.config)
        if engine in plan.listed_in:
            answer = "untested (it lists the type)"
        elif engine not in plan.loads_in:
            answer = "not known"
        elif tokens is None:
            answer = "yes"
        else:
            answer = f"yes, up to {tokens:,} tokens"
        found.append(f"{engine} {answer}")
    return ", ".join(found)
