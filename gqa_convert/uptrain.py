"""Deprecated: use `gqa_convert.uptrain_checkpoint`."""

import warnings

from gqa_convert.training.uptrain import uptrain_checkpoint as uptrain

__all__ = ["uptrain"]

warnings.warn("gqa_convert.uptrain is deprecated: use gqa_convert.uptrain_checkpoint", DeprecationWarning, stacklevel=2)
