"""Speech as a model's input: batches of sounds and what is said in them, for models that hear.

A batch holds `encoder_outputs`, what the encoder makes of windows of 30 seconds padded with silence, [windows, positions,
hidden_size] in bfloat16, and `decoder_input_ids` of their texts, cut to one length: sounds are sorted by the length of
their texts first, so that little is lost. The encoder runs once for each window, because no conversion changes it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gqa_convert.data.audio_files import AudioFile, Samples, read_audio
from gqa_convert.data.order import divided, mix, permuted
from gqa_convert.errors import DataError
from gqa_convert.families.loading import explained, load_tokenizer, no_warnings
from gqa_convert.runtime.json_objects import Config

_TASK = "transcribe"

_PER_HIDDEN = 12
_AT_ONCE = 16
"""Windows of a batch."""

Batch = dict[str, Tensor]


def speech_tokens_for(config: Config) -> int:
    """The default number of tokens of text: 12 per hidden dimension, some 240 sentences for Whisper base.

    Each comes with hundreds of positions of sound, on which the keys and values of cross-attention are fitted.
    """
    return _PER_HIDDEN * int(config["d_model"])


class Window(NamedTuple):
    """A sound of at most one window of the encoder, and what is said in it; None before the source has written it."""

    samples: Samples
    text: str | None


class SpeechModel:
    """A loaded speech model with its tokenizer and its feature extractor.

    Args:
        model: a loaded model.
        folder: its checkpoint.

    Attributes:
        rate: of the sound, in samples per second.
        window_samples: the samples of a window, which the encoder always reads whole.

    Raises:
        CorruptCheckpointError: it has no tokenizer or no feature extractor.
    """

    def __init__(self, model: Any, folder: Path) -> None:
        from transformers import AutoFeatureExtractor

        self.model = model
        with explained(f"the tokenizer or the feature extractor of {folder}"):
            self.tokenizer = load_tokenizer(folder)
            self._extractor = AutoFeatureExtractor.from_pretrained(folder)
        self.rate = int(self._extractor.sampling_rate)
        self.window_samples = int(self._extractor.n_samples)

    def features(self, windows: Sequence[Window]) -> Tensor:
        """The encoder's input, [windows, mel bins, frames], float32."""
        sounds = [window.samples for window in windows]
        made: Tensor = self._extractor(
            sounds, sampling_rate=self.rate, return_tensors="pt"
        ).input_features
        return made

    def text_tokens(self, text: str) -> list[int]:
        """The tokens of a text that is said, and the one that ends it; none for a text without words."""
        options = {"add_special_tokens": False, "split_special_tokens": True}
        ids: list[int] = self.tokenizer(f" {text}", **options)["input_ids"] if text else []
        return [*ids, self.tokenizer.eos_token_id] if ids else []

    def encode(self, windows: Sequence[Window]) -> Tensor:
        """What the encoder makes of windows, [windows, positions, hidden_size], on the model's device."""
        features = self.features(windows).to(self.model.device, self.model.dtype)
        with torch.no_grad():
            encoded: Tensor = self.model.get_encoder()(features).last_hidden_state
        return encoded

    def prompts(self, encoded: Tensor) -> Tensor:
        """The tokens with which the decoder begins, [windows, P]: for several languages, the one that the model hears."""
        generation = self.model.generation_config
        columns = [torch.full((len(encoded),), generation.decoder_start_token_id)]
        if self._is_multilingual:
            with torch.no_grad():
                columns.append(
                    self.model.detect_language(encoder_outputs=self.encoder_outputs(encoded)).cpu()
                )
            columns.append(torch.full_like(columns[0], generation.task_to_id[_TASK]))
        without_timestamps = getattr(generation, "no_timestamps_token_id", None)
        if without_timestamps is not None:
            columns.append(torch.full_like(columns[0], without_timestamps))
        return torch.stack(columns, dim=1)

    def transcribe(self, encoded: Tensor) -> list[str]:
        """What the model hears, by greedy search."""
        task = {"task": _TASK} if self._is_multilingual else {}
        most = self.model.config.max_target_positions // 2
        sound = self.encoder_outputs(encoded)
        with torch.no_grad(), no_warnings():
            ids = self.model.generate(
                encoder_outputs=sound, num_beams=1, do_sample=False, max_new_tokens=most, **task
            )
        return [text.strip() for text in self.tokenizer.batch_decode(ids, skip_special_tokens=True)]

    @property
    def _is_multilingual(self) -> bool:
        return bool(getattr(self.model.generation_config, "is_multilingual", False))

    def encoder_outputs(self, encoded: Tensor) -> Any:
        """What the encoder made, as the model's forward pass takes it."""
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=encoded.to(self.model.device, self.model.dtype))


def cut_windows(files: Iterable[AudioFile], speech: SpeechModel) -> Iterator[Window]:
    """The windows of files, one file after the other.

    A file that fits one window is one. A longer one is cut into windows; which part of its text is said in which of
    them is not known, so that they have none.
    """
    for file in files:
        samples = read_audio(file.path, speech.rate)
        length = speech.window_samples
        if len(samples) <= length:
            yield Window(samples, file.text)
            continue
        for first in range(0, len(samples) - speech.rate, length):
            yield Window(samples[first : first + length], None)


class SpokenText(NamedTuple):
    """A window as the model takes it: what its encoder makes of it, [positions, hidden_size], and the decoder's tokens, [length],
    with the prompt."""

    encoded: Tensor
    tokens: Tensor


class SpeechSize(NamedTuple):
    """How many tokens of text are wanted of each part; those of the prompts count."""

    layers: int
    held_out: int
    fresh: int


class Speech(NamedTuple):
    """Batches of speech.

    Attributes:
        layers: for the layers, keyword arguments of the model's forward pass.
        held_out: of other windows, for evaluation.
        fresh: of still other windows.
        tokens: of text in `layers`.
        description: what was heard, in words.
    """

    layers: list[Batch]
    held_out: list[Batch]
    fresh: list[Batch]
    tokens: int
    description: str


def speech_batches(
    speech: SpeechModel,
    files: Sequence[AudioFile],
    size: SpeechSize,
    *,
    seed: int,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Speech:
    """Draw windows of sound from all files without replacement; of less sound than is asked for, all is used.

    Args:
        speech: the source. It writes the texts that are not stated.
        files: the files, which are read in an order that `seed` decides.
        size: how much text.
        seed: of that order.
        progress: called with the tokens found and those wanted.

    Raises:
        DataError: a file can't be read, or nothing is said in any.
    """
    order = (files[permuted(number, len(files), mix(seed, 5))] for number in range(len(files)))
    windows = cut_windows(order, speech)
    found: list[SpokenText] = []
    tokens = written = 0
    while tokens < sum(size) and (group := list(islice(windows, _AT_ONCE))):
        spoken = _spoken(speech, group)
        found += spoken
        tokens += sum(len(each.tokens) for each in spoken)
        written += sum(window.text is None for window in group)
        progress(min(tokens, sum(size)), sum(size))
    if not found:
        raise DataError("the model hears no word in any of the files: name a folder of speech")
    parts = divided(found, [len(spoken.tokens) for spoken in found], size.layers, size.held_out)
    layers, held_out, fresh = map(_batches, parts)
    used = sum(batch["decoder_input_ids"].numel() for batch in layers)
    by = f"{written} texts written by the source" if written else "texts as stated"
    return Speech(layers, held_out, fresh, used, f"{used} tokens of {len(found)} sounds, {by}")


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
            found.append(SpokenText(sound, tokens[: speech.model.config.max_target_positions]))
    return found


def _batches(found: Sequence[SpokenText]) -> list[Batch]:
    """Batches of texts of about one length, cut to the shortest."""
    by_length = sorted(found, key=lambda spoken: len(spoken.tokens))
    made = []
    for first in range(0, len(by_length), _AT_ONCE):
        group = by_length[first : first + _AT_ONCE]
        ids = torch.stack([spoken.tokens[: len(group[0].tokens)] for spoken in group])
        encoded = torch.stack([spoken.encoded for spoken in group])
        made.append({"encoder_outputs": encoded, "decoder_input_ids": ids})
    return made
