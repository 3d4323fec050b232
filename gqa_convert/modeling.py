"""Deprecated: use `gqa_convert.register_modeling`."""

import warnings

from gqa_convert.families.modeling import register_modeling as register

__all__ = ["register"]

warnings.warn("gqa_convert.modeling is deprecated: use gqa_convert.register_modeling", DeprecationWarning, stacklevel=2)
