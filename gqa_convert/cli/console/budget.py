"""What `--kv-budget` has chosen, in lines for a terminal."""

from typing import TYPE_CHECKING

from .screen import print_note, stderr_console

if TYPE_CHECKING:
    from gqa_convert.measuring.sensitivity.choice import BudgetChoice


def note_choice(choice: "BudgetChoice") -> None:
    """Print the chosen numbers, and the divergences of all candidates, as notes on stderr."""
    console = stderr_console()
    if choice.warning:
        print_note(choice.warning, console)
    print_note(
        f"--kv-budget {choice.stated} allows {choice.limit_kv_bytes_per_token:,} of the "
        f"{choice.source_kv_bytes_per_token:,} bytes of K/V per token; chosen is {choice.reason}",
        console,
    )
