"""Speech with its text, for models that hear: folders of sound whose metadata state what is said.

Shape legend: b sounds, m mel bins, f frames of a window, n tokens of the longest text.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gqa_convert.checkpoint.paths import local_path
from gqa_convert.checkpoint.strict_json import Config
from gqa_convert.data.audio_files import list_audio_files, read_audio, seconds_of
from gqa_convert.data.decoder_start import generation_config
from gqa_convert.data.documents import Fields, Piece
from gqa_convert.data.encoders import tokenizer_state
from gqa_convert.data.files import Files
from gqa_convert.data.labels import IGNORED
from gqa_convert.data.objectives import SampleSettings
from gqa_convert.data.pairs import DocumentSampler, padded
from gqa_convert.data.sampler import Batch, Keys, Places, Shapes
from gqa_convert.data.sources import Source, TextSource
from gqa_convert.data.token_files import UNLEARNED, Encoder, Marked, ids_of, packed
from gqa_convert.errors import DataError
from gqa_convert.families.loading import SOUND_POSITIONS

_PREPROCESSOR = "preprocessor_config.json"
TASK = "transcribe"


def feature_extractor(folder: Path, config: Config) -> tuple[Any, list[str]]:
    """The feature extractor of a checkpoint, and a note if it has none, so that it is that of the type by default.

    Args:
        folder: the checkpoint.
        config: the content of its config.json.
    """
    from transformers import AutoFeatureExtractor, WhisperFeatureExtractor

    if (folder / _PREPROCESSOR).is_file():
        return AutoFeatureExtractor.from_pretrained(folder), []
    seconds = config["max_source_positions"] // SOUND_POSITIONS
    note = f"{folder} has no {_PREPROCESSOR}: the features are those of the type by default"
    return WhisperFeatureExtractor(config["num_mel_bins"], chunk_length=seconds), [note]


def prompt_tokens(generation: Config, start: int, language: int | None) -> list[int]:
    """The tokens with which the decoder of a model that hears begins.

    Args:
        generation: the content of its generation_config.json.
        start: the first of them.
        language: the token of the language, for a model of several ones.
    """
    prompt = [start]
    if language is not None:
        prompt += [language, generation["task_to_id"][TASK]]
    if generation.get("no_timestamps_token_id") is not None:
        prompt.append(generation["no_timestamps_token_id"])
    return prompt


def decoder_prompt(folder: Path, start: int, language: str | None) -> list[int]:
    """As `prompt_tokens`, for a checkpoint and a language such as `en`.

    Raises:
        DataError: the model knows several languages and not this one, or one and a language is stated.
    """
    generation = generation_config(folder)
    if not generation.get("is_multilingual"):
        if language is not None:
            raise DataError(
                f"the source states the language {language}, and the model knows one alone: remove `language`"
            )
        return prompt_tokens(generation, start, None)
    languages = generation["lang_to_id"]
    if f"<|{language}|>" not in languages:
        known = ", ".join(sorted(name.strip("<|>") for name in languages))
        raise DataError(f"the language of the speech is {language}: set `language` of the source to one of {known}")
    return prompt_tokens(generation, start, languages[f"<|{language}|>"])


def spoken_tokens(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text that is said, and the one that ends it; none for a text without words."""
    ids: list[int] = tokenizer(f" {text}", add_special_tokens=False)["input_ids"] if text else []
    return [*ids, tokenizer.eos_token_id] if ids else []


class SoundFolder(Files):
    """A folder of sound with a text for each file; see `audio_files`.

    Attributes:
        sounds: the files with their texts, a document each.

    Raises:
        DataError: there is no such folder, a file is missing, or a text.
    """

    def __init__(self, label: str) -> None:
        self.sounds = list_audio_files(local_path(label))
        if not all(sound.text for sound in self.sounds):
            raise DataError(
                f"{label} states no texts: training on speech needs a metadata.jsonl there, with `file_name` and `text` for each file"
            )
        super().__init__(label, [sound.path for sound in self.sounds])

    def identity(self) -> list[Any]:
        """See `Files.identity`; and the texts."""
        return [*super().identity(), [sound.text for sound in self.sounds]]

    def _pieces(self, fields: Fields) -> Iterator[Piece]:  # noqa: ARG002
        for sound in self.sounds:
            yield Piece(sound, where=str(sound.path))
        self.bytes_read = self.total_bytes


class SpokenTextEncoder:
    """Encodes what is said: the tokens with which the decoder begins, which are not learned, the text and its end.

    Attributes:
        fields: None; documents are `AudioFile`s.
        key: everything that determines the tokens of a text, as plain data.

    Raises:
        DataError: the model knows several languages and not the one that is stated.
    """

    fields = None

    def __init__(self, settings: SampleSettings, language: str | None, longest_seconds: float) -> None:
        self._tokenizer, self._longest = settings.tokenizer, longest_seconds
        self._prompt = decoder_prompt(settings.folder, settings.first_token, language)
        self.key = ["speech", tokenizer_state(settings.tokenizer), self._prompt, longest_seconds]

    def encode(self, pieces: Sequence[Piece]) -> Marked:
        """The tokens of texts, one behind the other: [tokens].

        Raises:
            DataError: a sound is longer than what the model hears at once, or can't be read.
        """
        texts = []
        for piece in pieces:
            seconds = seconds_of([piece.text])
            if seconds > self._longest:
                raise DataError(
                    f"{piece.where} lasts {seconds:.1f} seconds, and the model hears {self._longest:g} at once: cut the file and its text"
                )
            tokens = packed([self._prompt + spoken_tokens(self._tokenizer, piece.text.text)], [True])
            tokens[: len(self._prompt)] |= UNLEARNED
            texts.append(tokens)
        return np.concatenate(texts)


class SpeechSampler(DocumentSampler):
    """Sounds and what is said in them. Sounds are read when a batch needs them."""

    per_sample = 1
    noun = "texts"

    def __init__(self, settings: SampleSettings) -> None:
        super().__init__(settings)
        config = json.loads((settings.folder / "config.json").read_text(encoding="utf-8"))
        self._extractor, self.notes = feature_extractor(settings.folder, config)

    def open(self, source: Source) -> TextSource:
        """See `SoundFolder`."""
        return SoundFolder(source.source)

    def encoder(self, source: Source, text: TextSource) -> Encoder:  # noqa: ARG002
        """See `SpokenTextEncoder`."""
        longest = self._extractor.n_samples / self._extractor.sampling_rate
        return SpokenTextEncoder(self.settings, source.language, longest)

    def batch(self, places: Places, keys: Keys) -> Batch:  # noqa: ARG002
        """Sounds and texts.

        Returns:
            `input_features` [b, m, f] float32; `decoder_input_ids` [b, n]; and `labels` [b, n], the next tokens, IGNORED
            for the tokens with which the decoder begins and behind the end of a text.
        """
        rate = self._extractor.sampling_rate
        sounds, inputs, labels = [], [], []
        for tokens, number in places:
            text = self.document(tokens, number)
            inputs.append(ids_of(text[:-1]))
            labels.append(np.where(text[1:] & UNLEARNED, IGNORED, ids_of(text[1:])))
            assert isinstance(tokens.text, SoundFolder)
            sounds.append(read_audio(tokens.text.sounds[number].path, rate))
        features = self._extractor(sounds, sampling_rate=rate, return_tensors="np")
        return {
            "input_features": features.input_features.astype(np.float32),
            "decoder_input_ids": padded(inputs, self.settings.tokenizer.eos_token_id),
            "labels": padded(labels, IGNORED),
        }

    def shapes(self) -> Shapes:
        """See `Sampler.shapes`."""
        extractor = self._extractor
        sound = extractor.feature_size, extractor.n_samples // extractor.hop_length
        return {"input_features": sound, "decoder_input_ids": (self.settings.length,)}
