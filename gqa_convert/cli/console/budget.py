"""The choice for a budget of K/V cache, as notes on stderr."""

from typing import TYPE_CHECKING

from .screen import print_note, stderr_console

if TYPE_CHECKING:
    from gqa_convert.measuring.budget.choice import BudgetChoice, Candidate


def show_choice(choice: "BudgetChoice") -> None:
    """Print the chosen numbers, what they take of the budget, and the divergences of all candidates."""
    console, chosen = stderr_console(), choice.chosen
    if choice.warning:
        print_note(choice.warning, console)
    print_note(
        f"--kv-budget {choice.stated} allows {choice.limit:,} of the {choice.source_bytes:,} bytes of K/V per token; chosen is "
        f"--groups {_listed(choice.groups)}, {chosen.kv_bytes_per_token:,} bytes "
        f"({chosen.kv_bytes_per_token / choice.source_bytes:.1%})",
        console,
    )
    measured = "; ".join(f"{each.kl:.4f} for {_named(each)}" for each in choice.candidates)
    print_note(
        f"KL divergence from the source in nats per token, all layers merged by the closed form, on {choice.held_out_tokens:,} "
        f"held-out tokens: {measured}",
        console,
    )


def _listed(groups: int | list[int]) -> str:
    return str(groups) if isinstance(groups, int) else ",".join(map(str, groups))


def _named(candidate: "Candidate") -> str:
    uniform = len(set(candidate.groups)) == 1
    return f"N = {candidate.groups[0]} in every layer" if uniform else f"the {candidate.rule}"
