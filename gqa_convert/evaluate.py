"""The loss of a model on text."""

from collections.abc import Callable
from typing import Any

_LONGEST = 2048


def context_length(model: Any) -> int:
    """Tokens per block: what the model was made for, up to 2048."""
    stated = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(_LONGEST, stated) if isinstance(stated, int) and stated > 1 else _LONGEST


def text_loss(
    model: Any, token_ids: list[int], *, batch: int = 1, progress: Callable[[int, int], None] = lambda done, total: None
) -> float:
    """Mean next-token loss in nats per token; blocks overlap by one token, so that each token but the first is scored once.

    Args:
        model: a transformers causal LM, in evaluation mode.
        token_ids: the text.
        batch: blocks at a time.
        progress: called with the number of tokens scored and to be scored.

    Returns:
        The loss; NaN if the model produces it.

    Raises:
        ValueError: the text has fewer than two tokens.
    """
    import torch

    count = len(token_ids) - 1
    if count < 1:
        raise ValueError("a loss needs at least two tokens of text")
    ids, step = torch.tensor(token_ids), context_length(model) - 1
    whole = count // step
    runs = list(ids[: whole * step + 1].unfold(0, step + 1, step).split(batch)) if whole else []
    if count > whole * step:
        runs.append(ids[None, whole * step :])
    total, done = 0.0, 0
    with torch.inference_mode():
        for block in runs:
            block = block.to(model.device)
            logits = model(input_ids=block, use_cache=False).logits[:, :-1].double()
            total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), block[:, 1:].flatten(), reduction="sum"))
            done += block[:, 1:].numel()
            progress(done, count)
    return total / count
