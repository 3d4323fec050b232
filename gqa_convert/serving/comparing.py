"""Compares a client's answer with that of transformers."""

from dataclasses import dataclass

from .client import NEW_TOKENS, Answer


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences between a client's answer and that of transformers.

    Attributes:
        problems: what is wrong, in words; empty if the client is right.
        largest_difference: of the logits; None if the client gives none or they are not finite.
        allowed: the largest difference of logits that is accepted.
        compared_logits: how many logits were compared.
        tokens: how many tokens are equal.
        ties: how many other tokens are as likely within the tolerance.
    """

    problems: tuple[str, ...]
    largest_difference: float | None
    allowed: float
    compared_logits: int
    tokens: int
    ties: int


def compare(reference: Answer, answer: Answer, prompts: list[list[int]], tolerance: float) -> Comparison:
    """Compare two answers. A different token counts as a tie if transformers' logits of both tokens are within the
    tolerance.

    Args:
        reference: the answer of transformers, with logits.
        answer: the answer of the client.
        prompts: the prompts of both.
        tolerance: the difference of logits that is allowed, as a share of the spread between the reference's highest
            and lowest logit.
    """
    import numpy as np

    assert reference.logits is not None
    spread = max(float(each.max() - each.min()) for each in reference.logits)
    allowed = tolerance * spread
    problems: list[str] = []
    equal = ties = 0
    if len(answer.tokens) != len(prompts):
        problems.append(f"answered {len(answer.tokens)} of {len(prompts)} prompts")
    for prompt, ours, theirs, logits in zip(prompts, reference.tokens, answer.tokens, reference.logits, strict=False):
        first = next(
            (place for place in range(NEW_TOKENS) if theirs[place : place + 1] != ours[place : place + 1]), NEW_TOKENS
        )
        equal += first
        if first == NEW_TOKENS:
            continue
        if first >= len(theirs):
            problems.append(f"prompt of {len(prompt)} tokens: stopped after {first} of {NEW_TOKENS} new tokens")
            continue
        row = logits[len(logits) - NEW_TOKENS + first]
        if 0 <= theirs[first] < len(row) and row[ours[first]] - row[theirs[first]] <= allowed:
            ties += 1
            continue
        problems.append(
            f"prompt of {len(prompt)} tokens: new token {first + 1} is {theirs[first]}, and {ours[first]} in transformers"
        )
    largest, compared = None, 0
    if answer.logits is not None:
        largest = 0.0
        if len(answer.logits) != len(reference.logits):
            problems.append(f"gave logits of {len(answer.logits)} of {len(reference.logits)} sequences")
        for ours_, theirs_ in zip(reference.logits, answer.logits, strict=False):
            width = ours_.shape[1]
            if theirs_.shape[0] != ours_.shape[0] or theirs_.shape[1] < width:  # engines may pad the vocabulary
                problems.append(f"gave logits of shape {list(theirs_.shape)} for {list(ours_.shape)}")
                continue
            difference = float(np.abs(theirs_[:, :width].astype(np.float64) - ours_).max())
            largest, compared = max(largest, difference if np.isfinite(difference) else np.inf), compared + ours_.size
        if not np.isfinite(largest):
            problems.append("logits that are not finite")
        elif largest > allowed:
            problems.append(f"logits differ by up to {largest:.3g}, {allowed:.3g} is allowed")
    finite = largest if largest is None or np.isfinite(largest) else None
    return Comparison(tuple(problems), finite, allowed, compared, equal, ties)
