"""What the labels of a batch mean."""

from typing import Final

IGNORED: Final = -100
"""The label of a position that has no part in the loss (transformers' and torch's convention)."""
