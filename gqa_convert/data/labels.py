"""The convention for the labels of a batch."""

IGNORED = -100
"""The label of positions that the loss ignores, as in PyTorch and transformers."""
