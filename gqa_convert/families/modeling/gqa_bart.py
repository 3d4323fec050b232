"""BART and its like with fewer K/V heads than query heads (Ainslie et al. 2023): mBART, PLBart,
Pegasus, Marian, M2M100 (NLLB), NLLB-MoE, Blenderbot, Blenderbot Small and Speech2Text, and those
inside Florence-2 and Donut.

This file is part of gqa-convert. It is copied, with gqa_common.py, into every checkpoint
converted from one of these families, so that transformers loads the checkpoint without gqa-convert.
"""

from .gqa_common import GroupedAttention, class_maker

STOCK = (
    "BartAttention",
    "BioGptAttention",
    "BlenderbotAttention",
    "BlenderbotSmallAttention",
    "M2M100Attention",
    "MBartAttention",
    "MarianAttention",
    "NllbMoeAttention",
    "PLBartAttention",
    "PegasusAttention",
    "Speech2TextAttention",
)

__getattr__ = class_maker(__name__, attention=dict.fromkeys(STOCK, GroupedAttention))
