"""BioGPT with fewer K/V heads than query heads (Ainslie et al. 2023).

This file is part of gqa-convert. It is copied, with gqa_common.py, into every checkpoint converted from this family, so
that transformers loads the checkpoint without gqa-convert.
"""

from .gqa_common import GroupedAttention, class_maker

__getattr__ = class_maker(__name__, attention={"BioGptAttention": GroupedAttention})
