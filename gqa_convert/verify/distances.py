"""How far a model's predictions are from SOURCE's: what a calibrated method must do better than mean pooling."""

import math
from typing import Any

from gqa_convert.text.scoring.text_loss import context_length
from gqa_convert.verify.probe import Probe
from gqa_convert.verify.report import Failure

TEXT_TOKENS = 1024
"""Of a text, at most: the logits of every token are kept."""
_BLOCK = 256


class Predictions:
    """What models make of a text or, without one, of a probe's random tokens.

    Args:
        probe: random tokens.
        token_ids: of a text; its first `TEXT_TOKENS` are read.
    """

    def __init__(self, probe: Probe, token_ids: list[int] | None) -> None:
        self._probe = probe
        self._ids = None if token_ids is None else token_ids[:TEXT_TOKENS]

    def describe(self) -> str:
        return self._probe.describe() if self._ids is None else f"{len(self._ids):,} tokens of the text"

    def logits(self, model: Any) -> Any:
        """Of every token, [tokens, vocabulary]."""
        import torch

        if self._ids is None:
            return self._probe.output(model).float()
        with torch.inference_mode():
            blocks = torch.tensor(self._ids).split(context_length(model))
            return torch.cat([model(input_ids=block[None], use_cache=False).logits[0].float() for block in blocks])


def divergence(source: Any, other: Any) -> float:
    """KL(source || other) of two sets of logits [tokens, vocabulary], nats per token."""
    import torch

    if source.shape != other.shape:
        return math.inf
    total = 0.0
    for theirs, ours in zip(source.split(_BLOCK), other.split(_BLOCK), strict=True):
        wanted, found = (torch.log_softmax(block.double(), -1) for block in (theirs, ours))
        total += float((wanted.exp() * (wanted - found)).sum())
    return total / len(source)


def judge_distance(out: float, mean: float, what: str) -> str:
    """OUT is nearer to SOURCE than mean pooling would be."""
    text = f"KL from SOURCE {out:.4g} nats per token, {mean:.4g} for mean pooling: {what}"
    if not out < mean:
        raise Failure(text)
    return text
