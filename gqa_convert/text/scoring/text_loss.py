"""The loss of a causal model on tokens in memory."""

from collections.abc import Callable
from typing import Any

from gqa_convert.families.context_length import block_length
from gqa_convert.text.scoring.windows import cut_windows


def context_length(model: Any) -> int:
    """Tokens per block: the context length of a loaded model, at most 2048."""
    return block_length(model.config.to_dict())


def text_loss(
    model: Any, token_ids: list[int], *, batch: int = 1, progress: Callable[[int, int], None] = lambda done, total: None
) -> float:
    """Mean next-token loss in nats per token. Blocks overlap by one token, so that each token except the first is
    scored once.

    Args:
        model: a transformers causal LM, in evaluation mode.
        token_ids: the text.
        batch: blocks per forward pass.
        progress: called with the number of tokens scored and the total.

    Returns:
        The loss; NaN if the model produces NaN.

    Raises:
        ValueError: the text has fewer than two tokens.
    """
    import numpy as np

    from gqa_convert.text.scoring.forward import score
    from gqa_convert.text.scoring.texts import WindowBatches

    count, done = len(token_ids) - 1, 0
    if count < 1:
        raise ValueError("a loss needs at least two tokens of text")
    step = max(1, context_length(model) - 1)

    def advance(scored: int) -> None:
        nonlocal done
        done += scored
        progress(done, count)

    batches = WindowBatches(np.array(token_ids, np.int64), cut_windows([(0, len(token_ids))], step, step), batch)
    return float(score(model, batches, len(token_ids), progress=advance).loss.sum(dtype=np.float64)) / count
