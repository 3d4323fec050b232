"""Whether the caches of a benchmark fit this machine."""

from collections.abc import Sequence

from gqa_convert.conversion.plan import Plan
from gqa_convert.errors import DeviceMemoryError
from gqa_convert.families.windows import has_window


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
