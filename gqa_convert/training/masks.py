"""Builds model inputs such that documents packed into one row do not attend to one another.

In every other respect the mask must be the model's own, including sliding windows and chunks, which differ between
layers. transformers builds these masks from position ids that restart with each document; families whose classes don't
do so receive prepared masks.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from gqa_convert.families.table import FAMILIES


def packed_attention_mask(document_ids: Tensor, window: int | None = None) -> Tensor:
    """A mask for causal attention within each document: True where a query may attend to a key.

    Args:
        document_ids: [b, L], the number of each token's document.
        window: how many of the latest keys a query may attend to, including its own; None for all.

    Returns:
        [b, 1, L, L] bool, queries by keys.
    """
    allowed = (document_ids[:, :, None] == document_ids[:, None, :]).tril()
    if window is not None:
        allowed = allowed.triu(1 - window)
    return allowed[:, None]


def model_inputs(model: Any, batch: dict[str, Tensor]) -> dict[str, Any]:
    """The model inputs for a batch of packed documents; any other batch is returned unchanged.

    Args:
        model: a transformers model, not wrapped.
        batch: input_ids and whatever else the forward pass takes [b, L]; with document_ids, documents are kept apart
            and position_ids count within each.

    Returns:
        The batch without document_ids and with the masks that the model needs.
    """
    inputs: dict[str, Any] = dict(batch)
    document_ids = inputs.pop("document_ids", None)
    if document_ids is None:
        return inputs
    if not _takes_positions(model):
        del inputs["position_ids"]
    family = FAMILIES.get(model.config.model_type)
    if family is None or family.document_mask == "positions":
        return inputs
    whole = _prepared(model, packed_attention_mask(document_ids))
    if family.document_mask == "mask":
        return inputs | {"attention_mask": whole}
    window = getattr(model.config, "sliding_window", None)
    windowed = whole if window is None else _prepared(model, packed_attention_mask(document_ids, window))
    return inputs | {"attention_mask": {"full_attention": whole, "sliding_attention": windowed}}


def _takes_positions(model: Any) -> bool:
    parameters = inspect.signature(model.forward).parameters.values()
    return any(parameter.name == "position_ids" or parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)


def _prepared(model: Any, allowed: Tensor) -> Tensor:
    """A mask in the form that the model's attention expects: booleans for sdpa, additive numbers for eager attention."""
    if model.config._attn_implementation == "sdpa":
        return allowed
    blocked = torch.finfo(model.dtype).min
    return torch.zeros(allowed.shape, dtype=model.dtype, device=allowed.device).masked_fill_(~allowed, blocked)
