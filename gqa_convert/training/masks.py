"""Attention masks of packed samples."""

from torch import Tensor


def packed_attention_mask(document_ids: Tensor) -> Tensor:
    """Causal attention within each document: True where a query may look.

    Args:
        document_ids: [b, L], the number of each token's document.

    Returns:
        [b, 1, L, L] of bool: queries, then keys.
    """
    same = document_ids[:, :, None] == document_ids[:, None, :]
    return same.tril()[:, None]
