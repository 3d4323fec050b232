"""Chooses masks of blocks for documents packed into one row, where the device and the model's class can use them.

A dense mask has a number for each pair of tokens, which torch's attention copies for every layer. torch's
flex_attention reads a mask of blocks of 128 x 128 tokens instead, and computes the rest from the documents' numbers
while it runs. It has a backward pass on CUDA only, so other devices keep dense masks. transformers makes either mask
from position ids that restart with each document.
"""

from collections.abc import Mapping
from math import ceil
from typing import Any

from gqa_convert.families.table import FAMILIES

FLEX = "flex_attention"
"""transformers' name of the attention that reads masks of blocks."""
_BLOCK = 128
"""flex_attention's number of queries and of keys in a block."""
_DEVICES = frozenset({"cuda"})
"""The types of devices on which flex_attention has a backward pass."""


def uses_block_masks(config: Mapping[str, Any], device: str, dropout: float = 0.0) -> bool:
    """Whether documents of a model are kept apart by masks of blocks.

    Args:
        config: what its config.json holds.
        device: the type of device, `cuda` for example.
        dropout: the probability of every dropout; flex_attention has none.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = str(config.get("model_type"))
    family = FAMILIES.get(model_type)
    if device not in _DEVICES or dropout > 0:
        return False
    if family is not None and not (family.native and family.document_mask == "positions"):
        return False
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return isinstance(name, str) and bool(getattr(getattr(transformers, name, None), "_supports_flex_attn", False))


def mask_bytes(samples: int, length: int) -> int:
    """The bytes of a mask of blocks: the numbers of the blocks that each block of queries, and each block of keys,
    meets in part and as a whole, in int32; and the places and numbers of the documents, in int64.

    Args:
        samples: rows of a micro-batch.
        length: tokens of a row.
    """
    blocks = ceil(length / _BLOCK)
    return samples * (4 * 4 * blocks * (blocks + 1) + 2 * 8 * length)


def repeats_heads(heads: int) -> bool:
    """Whether transformers repeats keys and values for every query head before it calls flex_attention."""
    return heads & (heads - 1) != 0
