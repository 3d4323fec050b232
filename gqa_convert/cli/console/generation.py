"""What `generate-text` has made."""

from typing import TYPE_CHECKING

from .screen import stdout_console, styled

if TYPE_CHECKING:
    from gqa_convert.text.generating import GeneratedText


def show_generated(made: "GeneratedText") -> None:
    """Print the size of the text and where it is."""
    console = stdout_console()
    resumed = f", {made.resumed_tokens:,} of them by an earlier run" if made.resumed_tokens else ""
    console.print(
        styled(("done", "green"), f"  {made.tokens:,} tokens in {made.rows:,} texts{resumed}"), soft_wrap=True
    )
    console.print(f"      file  {made.file}", soft_wrap=True)
