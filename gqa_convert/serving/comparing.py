"""Compares what an engine computes with what transformers computes."""

from typing import Any

import numpy as np

from gqa_convert.checkpoint.strict_json import JsonObject

from .request import NEW_TOKENS
from .worker import Outcome

TOLERANCE = 1e-3
"""Difference of logits that is allowed, as a share of the spread between the reference's highest and lowest logit."""


def compare(reference: Outcome, found: Outcome, prompts: list[list[int]]) -> JsonObject:
    """Compare two answers. A different token counts as a tie if transformers' logits of both are within the tolerance,
    and ends the comparison of its prompt.

    Args:
        reference: of transformers, with tokens and logits.
        found: of the engine.
        prompts: of both.

    Returns:
        `problems` in words (empty if the engine is right), `largest_difference` of the logits (None if there are none, or
        they are not finite), the difference that is `allowed`, the number of `compared_logits`, of equal `tokens`, and of
        `ties`.
    """
    assert reference.tokens is not None
    assert reference.logits is not None
    tokens = found.tokens or []
    allowed = TOLERANCE * max(float(each.max() - each.min()) for each in reference.logits)
    result: JsonObject = {"problems": [], "largest_difference": None, "allowed": allowed, "compared_logits": 0}
    result |= {"tokens": 0, "ties": 0}
    if len(tokens) != len(prompts):
        result["problems"].append(f"answered {len(tokens)} of {len(prompts)} prompts")
        return result
    for prompt, ours, theirs, rows in zip(prompts, reference.tokens, tokens, reference.logits, strict=True):
        same = 0
        while same < NEW_TOKENS and theirs[same : same + 1] == [ours[same]]:
            same += 1
        result["tokens"] += same
        if same == NEW_TOKENS:
            continue
        row = rows[same - NEW_TOKENS]  # the last rows are those that choose the new tokens
        other = theirs[same] if same < len(theirs) else -1
        if 0 <= other < len(row) and row[ours[same]] - row[other] <= allowed:
            result["ties"] += 1
        else:
            what = f"is {other}, and {ours[same]} in transformers" if same < len(theirs) else "is missing"
            result["problems"].append(f"prompt of {len(prompt)} tokens: new token {same + 1} {what}")
    if found.logits is not None:
        _compare_logits(reference.logits, found.logits, result)
    return result


def _compare_logits(reference: list[Any], found: list[Any], result: JsonObject) -> None:
    """Add the difference of the logits to a result."""
    largest = 0.0
    for ours, theirs in zip(reference, found, strict=True):
        width = ours.shape[1]
        if len(theirs) != len(ours) or theirs.shape[1] < width:  # engines may pad the vocabulary
            result["problems"].append(f"gave logits of shape {list(theirs.shape)} for {list(ours.shape)}")
            return
        difference = np.abs(theirs[:, :width].astype(np.float64) - ours)
        if not np.isfinite(difference).all():
            result["problems"].append("logits that are not finite")
            return
        largest = max(largest, float(difference.max()))
        result["compared_logits"] += ours.size
    result["largest_difference"] = largest
    if largest > result["allowed"]:
        result["problems"].append(f"logits differ by up to {largest:.3g}, {result['allowed']:.3g} is allowed")
