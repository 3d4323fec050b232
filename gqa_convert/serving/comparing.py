"""Compares what an engine computes with what transformers computes."""

from os.path import commonprefix

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
        `problems` in words (empty if the engine is right), `largest_difference` of the logits (None if they are not
        finite), the difference that is `allowed`, the number of `compared_logits`, of equal `tokens`, and of
        `ties`.
    """
    allowed = TOLERANCE * max(float(np.ptp(each)) for each in reference.logits)
    problems = []
    equal = ties = compared = 0
    largest = 0.0
    if len(found.tokens) != len(prompts):
        problems.append(f"answered {len(found.tokens)} of {len(prompts)} prompts")
    answers = zip(prompts, reference.tokens, found.tokens, reference.logits, found.logits, strict=False)
    for prompt, ours, theirs, rows, their_rows in answers:
        same = len(commonprefix([ours, theirs]))  # noqa: RUF071 - of lists
        equal += same
        if same < NEW_TOKENS:
            other = theirs[same] if same < len(theirs) else -1
            if 0 <= other < rows.shape[1] and rows[same, ours[same]] - rows[same, other] <= allowed:
                ties += 1
            else:
                problems.append(f"prompt of {len(prompt)} tokens: new token {same + 1} is not {ours[same]}")
        padded = their_rows[:, : rows.shape[1]]  # engines may pad the vocabulary
        if padded.shape != rows.shape:
            problems.append(f"gave logits of shape {list(their_rows.shape)} for {list(rows.shape)}")
            continue
        largest = float(np.maximum(largest, np.abs(padded.astype(np.float64) - rows).max()))  # NaN stays
        compared += rows.size
    difference: float | None = largest
    if not np.isfinite(largest):
        problems.append("logits that are not finite")
        difference = None
    elif largest > allowed:
        problems.append(f"logits differ by up to {largest:.3g}, {allowed:.3g} is allowed")
    return {
        "problems": problems,
        "largest_difference": difference,
        "allowed": allowed,
        "compared_logits": compared,
        "tokens": equal,
        "ties": ties,
    }
