"""The check `better than mean`: a calibrated method predicts more like SOURCE than mean pooling does."""

import math
from typing import Any

from gqa_convert.text.scoring.text_loss import context_length
from gqa_convert.verify.behaviour.probe import Probe
from gqa_convert.verify.report import Failure, Finding

TEXT_TOKENS = 1024
"""Tokens of a text that are read at most, since the logits of all of them are kept."""
NEGLIGIBLE = 1e-3
"""Nats per token that roundings to 16 bits may cause. Where mean pooling loses nothing, as with heads that were repeated
upward, no method can do better.
"""
_BLOCK = 256
"""Tokens whose divergence is computed at a time."""


class Predictions:
    """The predictions of models on a text or, without one, on a probe's random tokens.

    Args:
        probe: the random tokens.
        token_ids: of a text; the first `TEXT_TOKENS` are read.
    """

    def __init__(self, probe: Probe, token_ids: list[int] | None) -> None:
        self._probe = probe
        self._ids = None if token_ids is None else token_ids[:TEXT_TOKENS]

    def describe(self) -> str:
        """What the predictions are made on."""
        return self._probe.describe() if self._ids is None else f"{len(self._ids):,} tokens of the text"

    def logits(self, model: Any) -> Any:
        """The logits of every token, [tokens, vocabulary]."""
        import torch

        if self._ids is None:
            return self._probe.output(model).float()
        with torch.inference_mode():
            blocks = torch.tensor(self._ids).split(context_length(model))
            return torch.cat([model(input_ids=block[None], use_cache=False).logits[0].float() for block in blocks])


def divergence(source: Any, other: Any) -> float:
    """KL(source || other) of two sets of logits [tokens, vocabulary], in nats per token."""
    import torch

    if source.shape != other.shape:
        return math.inf
    total = 0.0
    for theirs, ours in zip(source.split(_BLOCK), other.split(_BLOCK), strict=True):
        expected, found = (torch.log_softmax(block.double(), -1) for block in (theirs, ours))
        total += float((expected.exp() * (expected - found)).sum())
    return total / len(source)


def judge_divergence(out: float, mean: float, tokens: str) -> Finding:
    """OUT's divergence from SOURCE is smaller than that of mean pooling, or negligible.

    Args:
        out: OUT's divergence, in nats per token.
        mean: that of mean pooling.
        tokens: what they were measured on.
    """
    detail = f"KL from SOURCE {out:.4g} nats per token, {mean:.4g} for mean pooling: {tokens}"
    numbers = {"kl": out, "kl of mean pooling": mean}
    if not (out < mean or out <= NEGLIGIBLE):
        raise Failure(detail, numbers)
    return Finding(detail, numbers)
