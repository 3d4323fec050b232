"""The types of tensors that can be merged, and their sizes: what a plan needs of them, without numpy."""

from typing import Final

ITEM_BYTES: Final[dict[str, int]] = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
"""Bytes of a number by safetensors name."""
