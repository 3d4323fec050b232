"""The choice for a budget of K/V cache: the numbers by layer as a picture, and the divergences of all candidates."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .screen import print_note, stderr_console, stdout_console
from .tables import Column, show_table

if TYPE_CHECKING:
    from rich.console import Console

    from gqa_convert.measuring.budget.choice import BudgetChoice, Candidate

_BARS = "▁▂▃▄▅▆▇█"
_LETTERS = ".:-=+*#@"
"""In place of the bars where the terminal can't show them."""
_ROW = 50
"""Layers in one row of a picture."""


def note_choice(choice: "BudgetChoice") -> None:
    """Print the chosen numbers as notes on stderr, with a picture and the divergences of all candidates."""
    console = stderr_console()
    _show_numbers(choice, console)
    measured = "; ".join(f"{each.kl:.4f} for {_named(each)}" for each in choice.notable)
    print_note(f"{_measure(choice)}: {measured}", console)


def show_choice(choice: "BudgetChoice") -> None:
    """Print the chosen numbers on stdout, with a picture and a table of all candidates."""
    console = stdout_console()
    _show_numbers(choice, console)
    console.print(f"{_measure(choice)}:", soft_wrap=True)
    rows = [
        [
            _named(each) + (" (chosen)" if each is choice.chosen else ""),
            f"{each.kv_bytes_per_token:,}",
            f"{each.kv_bytes_per_token / choice.source_bytes:.1%}",
            f"{each.kl:.4f}",
        ]
        for each in choice.notable
    ]
    show_table(["", Column("bytes per token", "right"), Column("of the source", "right"), Column("KL", "right")], rows)


def picture(groups: Sequence[int], source: Sequence[int], characters: str = _BARS) -> list[str]:
    """Bars whose heights are the numbers of K/V heads by layer on a logarithmic scale, and a legend.

    Args:
        groups: the numbers, in the order of the layers.
        source: those of the source.
        characters: the bars, from the lowest to the highest.
    """
    most = max(source)

    def bar(count: int) -> str:
        return (
            characters[round((len(characters) - 1) * math.log(count) / math.log(most))] if most > 1 else characters[-1]
        )

    rows = []
    for first in range(0, len(groups), _ROW):
        row = groups[first : first + _ROW]
        label = f"layers {first}-{first + len(row) - 1}"
        rows.append(f"{label:<15} {''.join(map(bar, row))}")
    legend = ", ".join(f"{bar(count)} {count}" for count in sorted({*groups, most}, reverse=True))
    return [*rows, f"{'K/V heads':<15} {legend}"]


def _show_numbers(choice: "BudgetChoice", console: "Console") -> None:
    chosen = choice.chosen
    if choice.warning:
        print_note(choice.warning, console)
    print_note(
        f"--kv-budget {choice.stated} allows {choice.limit:,} of the {choice.source_bytes:,} bytes of K/V per token; chosen is "
        f"--groups {_listed(choice.groups)}, {chosen.kv_bytes_per_token:,} bytes "
        f"({chosen.kv_bytes_per_token / choice.source_bytes:.1%})",
        console,
    )
    best = min(choice.candidates, key=lambda candidate: candidate.kl)
    if best is not chosen and best.kl < chosen.kl:
        print_note(
            f"one number for all layers, since the best list's divergence, {best.kl:.4f}, is not below {choice.margin:g} "
            f"of its {chosen.kl:.4f}",
            console,
        )
    shown = (console.encoding or "").lower().startswith("utf")
    for line in picture(chosen.groups, choice.source_groups, _BARS if shown else _LETTERS):
        console.print(line, soft_wrap=True)


def _measure(choice: "BudgetChoice") -> str:
    merged = "fitted in a few steps" if choice.by_short_fits else "merged by the closed form"
    return (
        f"KL divergence from the source in nats per token, all layers {merged}, on "
        f"{choice.held_out_tokens:,} held-out tokens"
    )


def _listed(groups: int | list[int]) -> str:
    return str(groups) if isinstance(groups, int) else ",".join(map(str, groups))


def _named(candidate: "Candidate") -> str:
    uniform = len(set(candidate.groups)) == 1
    return f"N = {candidate.groups[0]} in every layer" if uniform else f"the {candidate.rule}"
