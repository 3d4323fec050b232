"""Compares what an engine computes with what transformers computes."""

from os.path import commonprefix
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
    allowed = TOLERANCE * max(float(np.ptp(each)) for each in reference.logits)
    problems: list[str] = []
    result: JsonObject = {"problems": problems, "largest_difference": None, "allowed": allowed, "compared_logits": 0}
    result |= {"tokens": 0, "ties": 0}
    if len(tokens) != len(prompts):
        problems.append(f"answered {len(tokens)} of {len(prompts)} prompts")
        return result
    for prompt, ours, theirs, rows in zip(prompts, reference.tokens, tokens, reference.logits, strict=True):
        same = len(commonprefix([ours, theirs]))  # noqa: RUF071 - of lists
        result["tokens"] += same
        if same == NEW_TOKENS:
            continue
        other = theirs[same] if same < len(theirs) else -1
        if 0 <= other < rows.shape[1] and rows[same, ours[same]] - rows[same, other] <= allowed:
            result["ties"] += 1
        else:
            problems.append(f"prompt of {len(prompt)} tokens: new token {same + 1} is not {ours[same]}")
    if found.logits is not None:
        _compare_logits(reference.logits, found.logits, result)
    return result


def _compare_logits(reference: list[Any], found: list[Any], result: JsonObject) -> None:
    """Add the difference of the logits to a result."""
    differences = []
    for ours, theirs in zip(reference, found, strict=True):
        padded = theirs[:, : ours.shape[1]]  # engines may pad the vocabulary
        if padded.shape != ours.shape:
            result["problems"].append(f"gave logits of shape {list(theirs.shape)} for {list(ours.shape)}")
            return
        differences.append(np.abs(padded.astype(np.float64) - ours).max())
        result["compared_logits"] += ours.size
    largest = float(np.max(differences))
    if not np.isfinite(largest):
        result["problems"].append("logits that are not finite")
        return
    result["largest_difference"] = largest
    if largest > result["allowed"]:
        result["problems"].append(f"logits differ by up to {largest:.3g}, {result['allowed']:.3g} is allowed")
