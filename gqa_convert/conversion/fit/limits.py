"""Sizes at which `fit` changes its way of computing; the estimate of a conversion reads them without importing torch."""

from typing import Any

from gqa_convert.checkpoint.machine import available_memory
from gqa_convert.conversion.plan import Plan
from gqa_convert.families.config_sizes import HIDDEN_SIZE_KEYS
from gqa_convert.families.context_length import stated_count

STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Of a ridge regression, relative to the mean of the Gram matrix's diagonal."""
MOST_DOUBLE_COLUMNS = 1024
"""Products of up to this many columns are made in float64; those of more in float32, and summed in float64."""
FEWER = 0.75
"""Of the rows of a weight: where merged heads have no more, products are made of them."""
ACTIVATIONS = 40
"""Roughly how many numbers a layer keeps for the backward pass, per token and unit of hidden_size."""
_WIDE = 256
"""The hidden_size from which on products take longer in float32 than the conversions between types."""
_HALF = ("F16", "BF16")
_MOST_PARAMETERS = 200_000_000
"""A CPU would need hours for more."""
_SHARE = 0.7
"""Of the free memory that a backward pass may take."""


def may_be_reduced(plan: Plan) -> bool:
    """Whether products with activations lose nothing in bfloat16 and are large enough to gain by it: the merged layers of
    the source have 16 bits.
    """
    changed = {change.name for change in plan.changes}
    dtypes = {entry.dtype for _, name, entry in plan.checkpoint.tensors() if name in changed}
    return dtypes <= set(_HALF) and (stated_count(plan.checkpoint.config, HIDDEN_SIZE_KEYS) or 0) >= _WIDE


def has_room(parameters: int, tokens: int, hidden_size: int, layers: int, vocabulary: int, place: Any) -> bool:
    """Whether a model of these sizes can be trained as a whole on a device, apart from its weights' own memory.

    Args:
        parameters: of the model.
        tokens: of a sequence.
        hidden_size: of the model.
        layers: of the model.
        vocabulary: of the model.
        place: a torch device, or an object with its `type`.
    """
    if place.type == "cpu" and parameters > _MOST_PARAMETERS:
        return False
    return must_recompute(tokens, hidden_size, layers, vocabulary, place) is not None


def must_recompute(tokens: int, hidden_size: int, layers: int, vocabulary: int, place: Any) -> bool | None:
    """Whether memory is too short to keep all activations of a sequence for its backward pass, so that each layer keeps
    its input and computes the others again. None if memory is too short for that as well.

    Args:
        tokens: see `has_room`, like the others.
        hidden_size: see there.
        layers: see there.
        vocabulary: see there.
        place: see there.
    """
    free = available_memory(place)
    if free is None:
        return None
    for recomputes in (False, True):
        if backward_bytes(tokens, hidden_size, layers, vocabulary, recomputes=recomputes) < _SHARE * free:
            return recomputes
    return None


def backward_bytes(tokens: int, hidden_size: int, layers: int, vocabulary: int, *, recomputes: bool) -> int:
    """What a sequence keeps for its backward pass, in float32, logits of student and source included.

    Args:
        tokens: see `has_room`, like the others.
        hidden_size: see there.
        layers: see there.
        vocabulary: see there.
        recomputes: whether each layer keeps its input only.
    """
    kept = (ACTIVATIONS + layers) * hidden_size if recomputes else ACTIVATIONS * hidden_size * layers
    return 4 * tokens * (kept + 3 * vocabulary)
