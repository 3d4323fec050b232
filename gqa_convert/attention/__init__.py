"""Grouped-query attention for people who write their own models, and for transformers.

With H query heads and N key/value heads, multi-head attention (N = H; Vaswani et al. 2017),
grouped-query attention (1 < N < H; Ainslie et al. 2023, *GQA: Training Generalized Multi-Query
Transformer Models from Multi-Head Checkpoints*) and multi-query attention (N = 1; Shazeer 2019,
*Fast Transformer Decoding: One Write-Head is All You Need*) are one layer. Query head i reads
key/value head i // (H / N), as everywhere in this package.

This package needs torch; transformers is imported by `register` alone.
"""

from .cache import KVCache
from .core import grouped_query_attention
from .dropin import GroupedMultiheadAttention, convert_module
from .interface import register
from .layer import GroupedQueryAttention, Rotary

__all__ = [
    "GroupedMultiheadAttention",
    "GroupedQueryAttention",
    "KVCache",
    "Rotary",
    "convert_module",
    "grouped_query_attention",
    "register",
]
