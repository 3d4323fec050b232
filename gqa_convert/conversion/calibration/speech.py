"""Speech as calibration of a model that hears: sounds and what is said in them.

A batch holds `encoder_outputs`, what the encoder makes of windows of 30 seconds padded with
silence, [windows, positions, hidden_size] in bfloat16, and `decoder_input_ids` of their texts, cut
to one length: sounds are sorted by the length of their texts first, so that little is lost. The
encoder runs once for each window, because no conversion changes it.
"""

from collections.abc import Callable, Sequence
from itertools import islice

import torch
from torch import Tensor

from gqa_convert.data.order import mix, shuffled
from gqa_convert.data.speech import AudioFile, SpeechModel, Window, cut_windows
from gqa_convert.errors import DataError

from .streams import Batches, Calibration, Request, digest_of, divided

_AT_ONCE = 16
"""Windows of a batch."""


SpokenText = tuple[Tensor, Tensor]
"""A window as the model takes it: what its encoder makes of it, [positions, hidden_size], and the
tokens of the decoder, [length], with the prompt.
"""


def draw_speech(
    request: Request,
    label: str,
    files: Sequence[AudioFile],
    speech: SpeechModel,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Calibration:
    """Draw windows of sound from all files without replacement.

    Of less sound than is asked for, all is used.

    Args:
        request: what is asked for; the tokens of prompts count.
        label: of the folder.
        files: in it, with texts or without.
        speech: the source. It writes the texts that are not stated.
        progress: called with the tokens found and those wanted.

    Raises:
        DataError: a file can't be read, or nothing is said in any.
    """
    # Hear the files in random order, as far as needed.
    order = shuffled(files, mix(request.seed, 5))
    windows = cut_windows(order, speech)
    found: list[SpokenText] = []
    tokens = written = 0
    while tokens < request.tokens and (group := list(islice(windows, _AT_ONCE))):
        spoken = _spoken(speech, group)
        found += spoken
        tokens += sum(len(ids) for _, ids in spoken)
        written += sum(window.text is None for window in group)
        progress(min(tokens, request.tokens), request.tokens)
    if not found:
        raise DataError("the model hears no word in any of the files: name a folder of speech")

    # Divide them, and make batches.
    parts = divided(found, [len(ids) for _, ids in found], request)
    fitted, held_out, fresh = (_batches(part, request.seed) for part in parts)

    # Say what they are.
    used = sum(batch["decoder_input_ids"].numel() for batch in fitted)
    by = f"{written} texts written by the source" if written else "texts as stated"
    return Calibration(
        batches=fitted,
        tokens=used,
        digest=digest_of([], fitted),
        description=f"{used} tokens of {len(found)} sounds, {by}",
        held_out=held_out,
        label=label,
        fresh=fresh,
    )


def _spoken(speech: SpeechModel, windows: Sequence[Window]) -> list[SpokenText]:
    """Windows with their texts as tokens; those in which nothing is said are left out."""
    encoded = speech.encode(windows)
    kept = encoded.to("cpu", torch.bfloat16)
    untold = [number for number, window in enumerate(windows) if window.text is None]
    heard = iter(speech.transcribe(encoded[untold]) if untold else ())
    found = []
    for window, sound, prompt in zip(windows, kept, speech.prompts(encoded), strict=True):
        ids = speech.text_tokens(next(heard) if window.text is None else window.text)
        if ids:
            tokens = torch.cat([prompt, torch.tensor(ids)])
            found.append((sound, tokens[: speech.model.config.max_target_positions]))
    return found


def _batches(found: Sequence[SpokenText], seed: int) -> Batches:
    """Batches of texts of about one length, cut to the shortest.

    They come in random order, since the last ones are for validation.
    """
    by_length = sorted(found, key=lambda spoken: len(spoken[1]))
    made: Batches = []
    for first in range(0, len(by_length), _AT_ONCE):
        sounds, texts = zip(*by_length[first : first + _AT_ONCE], strict=True)
        ids = torch.stack([text[: len(texts[0])] for text in texts])
        made.append({"encoder_outputs": torch.stack(sounds), "decoder_input_ids": ids})
    return shuffled(made, mix(seed, 8))
