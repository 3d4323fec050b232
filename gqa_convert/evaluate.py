"""The loss of a model on text."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TextLoss:
    """Mean loss in nats per token, and over how many tokens it was taken."""

    nats_per_token: float
    tokens: int


def text_loss(model: Any, token_ids: list[int], *, context: int, batch: int = 8) -> TextLoss:
    """Mean next-token loss over consecutive blocks; every token but each block's first is scored once.

    Args:
        model: a transformers causal LM, in evaluation mode.
        token_ids: the text.
        context: tokens per block.
        batch: blocks at a time.

    Returns:
        The loss, NaN included if the model produces it.

    Raises:
        ValueError: the text has fewer than two tokens.
    """
    import torch

    if len(token_ids) < 2:
        raise ValueError("a loss needs at least two tokens of text")
    whole = len(token_ids) // context * context
    runs = list(torch.tensor(token_ids[:whole], dtype=torch.long).reshape(-1, context).split(batch)) if whole else []
    if len(token_ids) - whole > 1:
        runs.append(torch.tensor([token_ids[whole:]], dtype=torch.long))
    total, count = 0.0, 0
    with torch.inference_mode():
        for ids in runs:
            ids = ids.to(model.device)
            logits = model(input_ids=ids).logits[:, :-1].float()
            total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))
            count += ids[:, 1:].numel()
    return TextLoss(total / count, count)
