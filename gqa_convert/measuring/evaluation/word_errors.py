"""Word errors of a speech model: what it writes, by greedy search, against what is said."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gqa_convert.errors import MissingExtraError
from gqa_convert.text.audio_files import AudioFile
from gqa_convert.text.speech import SpeechModel, cut_windows


@dataclass(frozen=True, slots=True)
class WordErrors:
    """Counts of each sound, [m]: words that are wrong, missing or too many, and words that are said."""

    errors: npt.NDArray[np.float64]
    words: npt.NDArray[np.float64]


def normalised(text: str) -> str:
    """Lower case without punctuation, so that only words count."""
    return " ".join(re.sub(r"[^\w\s']", " ", text.lower()).split())


def word_errors(
    speech: SpeechModel, files: Sequence[AudioFile], *, batch: int, progress: Callable[[int], None]
) -> WordErrors:
    """Count the word errors of a model in each sound (Levenshtein distance in words).

    Args:
        speech: the model.
        files: sounds of one window each, with their texts.
        batch: sounds at a time.
        progress: called with the number of sounds that were transcribed.

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
    for first in range(0, len(files), batch):
        some = files[first : first + batch]
        windows = [next(cut_windows([file], speech)) for file in some]
        for file, heard in zip(some, speech.transcribe(speech.encode(windows)), strict=True):
            said = normalised(file.text or "")
            found = jiwer.process_words(said, normalised(heard))
            errors.append(found.substitutions + found.deletions + found.insertions)
            words.append(len(said.split()))
        progress(len(some))
    return WordErrors(np.array(errors, np.float64), np.array(words, np.float64))
