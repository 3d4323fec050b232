"""Computes what fits into a memory budget, and whether the caches of a benchmark fit this machine."""

from collections.abc import Sequence

from gqa_convert.conversion.plan import Plan
from gqa_convert.errors import DeviceMemoryError
from gqa_convert.families.windows import has_window
from gqa_convert.measuring.results import TimedCell


def check_room(plans: Sequence[Plan], batch: int, context: int, encoder_tokens: int | None, room: int | None) -> None:
    """Refuse caches that the memory can't hold, since some systems kill such a process without a message.

    Args:
        plans: of the versions, which keep their caches while others are timed.
        batch: sequences.
        context: tokens in the cache.
        encoder_tokens: of an encoder-decoder's input.
        room: available bytes, None if unknown.

    Raises:
        DeviceMemoryError: the caches are larger.
    """
    if room is None or any(has_window(plan.config) for plan in plans):  # these models truncate their caches themselves
        return
    own = context * sum(plan.cache_bytes_per_token(True) for plan in plans)
    cross = (encoder_tokens or 0) * sum(plan.cache_bytes_per_token(True, "cross") for plan in plans)
    needed = batch * (own + cross)
    if needed > room:
        raise DeviceMemoryError(
            f"the caches of {len(plans)} version(s) take {needed:,} bytes at batch {batch} and context {context}, and "
            f"{room:,} are free: time fewer --candidates, or a smaller --batch or --context"
        )


def with_capacity(cell: TimedCell, budget: int, weight_bytes: int, positions: int | None) -> TimedCell:
    """A result with the largest batch at its context and the longest context at its batch that fit a budget.

    Weights (exact, from the shapes) and K/V cache (as measured) fill the budget; activations, the copy that a growing
    cache makes of a layer, the framework and fragmentation are not counted.

    Args:
        cell: the measured result.
        budget: bytes.
        weight_bytes: of all weights.
        positions: maximum number of tokens, None for any number.
    """
    free = max(0, budget - weight_bytes)
    assert cell.kv_bytes
    assert cell.kv_bytes_per_token
    crossed = (cell.encoder_tokens or 0) * (cell.cross_kv_bytes_per_encoder_token or 0)
    batch = cell.batch * free // cell.kv_bytes
    context = max(0, int((free / cell.batch - crossed) // cell.kv_bytes_per_token))
    if positions is not None:
        context = min(context, positions)
    return cell.model_copy(update={"weight_bytes": weight_bytes, "largest_batch": batch, "largest_context": context})
