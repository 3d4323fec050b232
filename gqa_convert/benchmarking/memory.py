"""What fits into a memory budget."""

from typing import Any, Final

from gqa_convert.errors import OptionError

ASSUMED: Final = (
    "weights (exact, from the shapes) and K/V cache (bytes per token as measured in the live cache) fill the budget; activations, the "
    "copy that a growing cache makes of a layer, the framework and fragmentation are not counted, and nothing was allocated to prove it"
)


def check_budget(budget: int, weight_bytes: dict[int, int]) -> None:
    """Refuse a budget that no version's weights fit into.

    Raises:
        OptionError: that is so.
    """
    groups, least = min(weight_bytes.items(), key=lambda item: item[1])
    if budget <= least:
        raise OptionError(f"--memory {budget:,} bytes: the weights alone take {least:,} with {groups} K/V heads: give more")


def fitting(
    budget: int, weight_bytes: int, token_bytes: float, cross_bytes: float, *, batch: int, context: int, encoder_tokens: int, positions: int | None
) -> dict[str, Any]:  # fmt: skip
    """The largest batch at this context and the longest context at this batch.

    Args:
        budget: bytes.
        weight_bytes: of all weights.
        token_bytes: K/V bytes per token and sequence.
        cross_bytes: K/V bytes per token of an encoder's output and sequence.
        batch: sequences.
        context: tokens.
        encoder_tokens: of the encoder's input; 0 without one.
        positions: tokens that the model can have; None for any number.
    """
    free = budget - weight_bytes
    sequence = token_bytes * context + cross_bytes * encoder_tokens
    longest = int((free / batch - cross_bytes * encoder_tokens) // token_bytes) if token_bytes else positions
    if longest is not None and positions is not None:
        longest = min(longest, positions)
    return {
        "weight_bytes": weight_bytes,
        "largest_batch": max(0, int(free // sequence)) if sequence else None,
        "largest_context": None if longest is None else max(0, longest),
    }
