"""The printed result of a recommendation."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from gqa_convert.checkpoint.byte_sizes import size
from gqa_convert.measuring.recommend.recommendation import ConsideredGroups, Recommendation
from gqa_convert.measuring.results.schemas import Machine

from .screen import number, print_note, stdout_console, styled
from .tables import show_table

if TYPE_CHECKING:
    from rich.text import Text

_STATED = {"loss": "max_loss_increase", "speed": "min_speedup", "memory": "memory"}

_LOSSES = {
    "predicted": "predicted loss after fit",
    "upper bound": "upper bound of the closed form",
    "measured": "measured",
}


def show_recommendation(result: Recommendation) -> None:
    """Print a row for each N with failed limits in red, then the recommended N and the command that makes it."""
    console = stdout_console()
    console.print(
        styled(
            (result.source, "bold"),
            f": {result.model_type}, {result.heads} query heads, {result.kv_heads} K/V heads",
        ),
        soft_wrap=True,
    )
    _show_origins(result)
    columns = _columns(result)
    rows: list[list[str | Text]] = []
    for each in result.candidates:
        cells = [_marked(form(each), part in each.fails) for part, form in columns.values()]
        name = f"{each.groups} (source)" if each.source else str(each.groups)
        verdict = (
            ("recommended", "green")
            if each.groups == result.groups
            else (f"fails {', '.join(each.fails)}" if each.fails else "", "red")
        )
        rows.append([name, *cells, styled(verdict)])
    show_table(["N", *columns, ""], rows)
    for note in [*result.notes, *([f"memory: {result.memory.counted}"] if result.memory else [])]:
        print_note(note)
    mark = ("no N fits", "yellow") if result.groups is None else ("recommended", "green")
    console.print(styled(mark, f"  {result.reason}"), soft_wrap=True)
    if result.next:
        console.print(f"next     {result.next}", soft_wrap=True)
    if result.by_layer:
        console.print(f"by layer {result.by_layer}", soft_wrap=True)


def _columns(result: Recommendation) -> dict[str, tuple[str, Callable[[ConsideredGroups], str]]]:
    """Return, for each heading, the limit that it belongs to and the format of a cell; empty columns are omitted."""
    crossing = any(each.cross_kv_bytes_per_encoder_token for each in result.candidates)
    every: dict[str, tuple[str, str, Callable[[ConsideredGroups], str]]] = {
        "loss increase": ("loss", "loss_increase", _loss),
        "speed": ("speed", "speedup", lambda each: "" if each.speedup is None else f"{each.speedup:.2f}x"),
        "ms/token": ("", "decode_ms_per_token", lambda each: number(each.decode_ms_per_token, ",.2f")),
        "K/V/token" + (" + cross" if crossing else ""): ("", "kv_bytes_per_token", _cache),
        "memory": (
            "memory",
            "memory_bytes",
            lambda each: "" if each.memory_bytes is None else size(each.memory_bytes),
        ),
        "largest batch": ("", "largest_batch", lambda each: number(each.largest_batch, ",")),
        "largest context": ("", "largest_context", lambda each: number(each.largest_context, ",")),
    }
    merged = [each for each in result.candidates if not each.source]
    return {
        heading: (part, form)
        for heading, (part, key, form) in every.items()
        if any(getattr(each, key) is not None for each in merged)
    }


def _loss(each: ConsideredGroups) -> str:
    if each.loss_increase is None:
        return ""
    if each.loss_low is not None and each.loss_high is not None:
        return f"{each.loss_increase:+.3f} ({each.loss_low:.3f} to {each.loss_high:.3f})"
    return f"{'<= ' if each.loss_is == 'upper bound' else ''}{each.loss_increase:+.4f}"


def _cache(each: ConsideredGroups) -> str:
    cross = each.cross_kv_bytes_per_encoder_token
    return size(each.kv_bytes_per_token) + (f" + {size(cross)}" if cross else "")


def _marked(text: str, failed: bool) -> "Text":
    return styled((f"{text or '?'} !!", "red") if failed else text)


def _show_origins(result: Recommendation) -> None:
    """Print the limits that were asked for, and where losses and times come from."""
    console, asked, speed = stdout_console(), result.constraints, result.speed
    words = {
        "max_loss_increase": lambda value: f"loss at most {value:g} nats per token above the source's",
        "min_speedup": lambda value: f"decode steps at least {value:g} times as fast",
        "memory": lambda value: f"at most {size(value)} for weights and K/V cache",
    }
    parts = [words[key](value) for key in _STATED.values() if (value := getattr(asked, key)) is not None]
    if asked.context is not None:
        encoder = f", {asked.encoder_tokens:,} of the input" if asked.encoder_tokens is not None else ""
        parts.append(f"context {asked.context:,}{encoder}, batch {asked.batch}")
    console.print(f"asked    {'; '.join(parts)}", soft_wrap=True)
    if result.loss:
        kinds = sorted({_LOSSES[each.loss_is] for each in result.candidates if each.loss_is})
        console.print(f"loss     {' and '.join(kinds)}, on {result.loss.text}", soft_wrap=True)
    if speed:
        machine = speed.machine or Machine()
        where = f"{machine.processor or 'unrecorded machine'}, {machine.device or 'unrecorded device'}"
        some = "" if speed.layers == speed.model_layers else f", {speed.layers} of {speed.model_layers} layers"
        crossing = f", {speed.encoder_tokens:,} of the input" if speed.encoder_tokens is not None else ""
        origin = f"{speed.origin}, " if speed.origin else ""
        setting = f"batch {speed.batch}, context {speed.context:,}{crossing}{some}"
        console.print(
            f"speed    {origin}{setting}, {speed.dtype}, attention {speed.attention}; {where}", soft_wrap=True
        )
