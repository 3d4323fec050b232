"""Word errors of a speech model: what it writes, by greedy search, against what is said."""

import re
from collections.abc import Sequence

import numpy as np

from gqa_convert.errors import MissingExtraError
from gqa_convert.measuring.evaluation.examples import Doubles


def normalised(text: str) -> str:
    """Lower case without punctuation, so that only words count."""
    return " ".join(re.sub(r"[^\w\s']", " ", text.lower()).split())


def word_errors(said: Sequence[str], heard: Sequence[str]) -> tuple[Doubles, Doubles]:
    """The words of each sound, [m], that are wrong, missing or too many (Levenshtein distance), and those that are said.

    Args:
        said: the texts.
        heard: what the model wrote.

    Raises:
        MissingExtraError: jiwer is not installed.
    """
    try:
        import jiwer
    except ImportError:
        raise MissingExtraError(
            "word errors need jiwer, which is not installed: pip install 'gqa-convert[audio]'"
        ) from None
    errors, words = [], []
    for text, written in zip(map(normalised, said), map(normalised, heard), strict=True):
        found = jiwer.process_words(text, written)
        errors.append(found.substitutions + found.deletions + found.insertions)
        words.append(len(text.split()))
    return np.array(errors, np.float64), np.array(words, np.float64)
