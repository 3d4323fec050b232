"""Speech: folders of sound, and windows of them as a model that hears reads them.

A folder follows the convention of `datasets`' `audiofolder`: files of metadata in it state
`file_name`, from where they lie, and `text` for each sound; without them, every audio file counts,
and there are no texts. soundfile decodes the files, and soxr resamples them.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gqa_convert.errors import DataError, MissingExtraError
from gqa_convert.families import loading

from .files import explained, read_rows
from .folders import TRAIN, data_files, note_unread

_TASK = "transcribe"
SUFFIXES = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".aiff", ".aif")
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
SHORTEST_SECONDS = 0.2
"""A shorter file holds no word."""

Samples = npt.NDArray[np.float32]


class AudioFile(NamedTuple):
    """A file of sound, and what is said in it; None where the folder has no texts."""

    path: Path
    text: str | None


def list_audio_files(folder: Path, split: str = TRAIN) -> list[AudioFile]:
    """The audio files of a folder, in the order of their metadata, or of their names.

    Raises:
        DataError: there is no folder, no such split or no audio file, or the metadata does not fit
            the files.
    """
    if not folder.is_dir():
        raise DataError(
            f"{folder} is no folder: a model that hears takes a folder of audio files, with texts "
            "or without"
        )
    paths = data_files(folder, SUFFIXES, split, shared=METADATA)
    sounds = [path for path in paths if path.name not in METADATA]
    if not sounds:
        raise DataError(
            f"{folder} holds no audio files ({', '.join(SUFFIXES)}): name a folder that does"
        )
    texts = {}
    for metadata in (path for path in paths if path.name in METADATA):
        with explained(metadata), metadata.open("rb") as handle:
            rows = [row for _, row in read_rows(metadata, handle, ("file_name", "text"))]
        if not rows:
            raise DataError(f"{metadata} has no rows: add one for each audio file, or remove it")
        for row in rows:
            name, text = row.get("file_name"), row.get("text")
            path = metadata.parent / str(name)
            problem = ""
            if path in texts:
                problem = f"names {name}, which a row before it names: remove one of them"
            elif not path.is_file():
                problem = f"names {name}, which is not there: add it or remove the row"
            elif not isinstance(text, str):
                problem = f"states no text for {name}: add it, or remove the row"
            if problem:
                raise DataError(f"{metadata} {problem}")
            texts[path] = str(text)
    # rows of one file may describe sounds of several splits
    found = [AudioFile(path, text) for path, text in texts.items() if path in sounds]
    if found:
        note_unread(folder, {path: "not in the metadata" for path in sounds if path not in texts})
    return found or [AudioFile(path, None) for path in sounds]


def read_audio(path: Path, rate: int) -> Samples:
    """The samples of a file, [n], of one channel at `rate` samples per second.

    Raises:
        DataError: the file can't be decoded, is shorter than `SHORTEST_SECONDS`, or holds NaN.
        MissingExtraError: soundfile or soxr is not installed.
    """
    try:
        import soundfile
        import soxr
    except ImportError as problem:
        raise MissingExtraError(
            f"reading sound needs {problem.name}, which is not installed: pip install "
            "'gqa-convert[audio]'"
        ) from None
    try:
        channels, found_rate = soundfile.read(path, dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, OSError) as problem:
        raise DataError(
            f"{path} can't be read as sound ({problem}): repair it, or take it out of the folder"
        ) from None
    samples: Samples = soxr.resample(channels.mean(axis=1), found_rate, rate)
    fault = ""
    if len(samples) < SHORTEST_SECONDS * rate:
        fault = (
            f"lasts {len(samples) / rate:.2f} seconds, "
            f"and nothing is said in less than {SHORTEST_SECONDS}"
        )
    elif not np.isfinite(samples).all():
        fault = "holds samples that are no finite numbers"
    if fault:
        raise DataError(f"{path} {fault}: take it out of the folder")
    return samples


class Window(NamedTuple):
    """A sound of at most one window of the encoder, and what is said in it; None before the source
    has written it.
    """

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
        DataError: its encoder has no window of one length.
    """

    def __init__(self, model: Any, folder: Path) -> None:
        from transformers import AutoFeatureExtractor

        self.model = model
        with loading.explained(f"the tokenizer or the feature extractor of {folder}"):
            self.tokenizer = loading.load_tokenizer(folder)
            self._extractor = AutoFeatureExtractor.from_pretrained(folder)
        if not hasattr(self._extractor, "n_samples"):
            raise DataError(
                f"the encoder of {folder} reads sounds of any length, and only models that read "
                "windows of one length, as Whisper does, are run on sound here: convert it without "
                "--calibration"
            )
        self.rate = int(self._extractor.sampling_rate)
        self.window_samples = int(self._extractor.n_samples)

    def features(self, windows: Sequence[Window]) -> Tensor:
        """The encoder's input, [windows, mel bins, frames], float32."""
        sounds = [window.samples for window in windows]
        found = self._extractor(sounds, sampling_rate=self.rate, return_tensors="pt")
        return found.input_features

    def text_tokens(self, text: str | None) -> list[int]:
        """The tokens of a text that is said, and the one that ends it; none for a text without
        words.
        """
        options = {"add_special_tokens": False, "split_special_tokens": True}
        ids: list[int] = self.tokenizer(f" {text}", **options)["input_ids"] if text else []
        return [*ids, self.tokenizer.eos_token_id] if ids else []

    def encode(self, windows: Sequence[Window]) -> Tensor:
        """What the encoder makes of windows, [windows, positions, hidden_size], on the model's
        device.
        """
        features = self.features(windows).to(self.model.device, self.model.dtype)
        with torch.no_grad():
            return self.model.get_encoder()(features).last_hidden_state

    def prompts(self, encoded: Tensor) -> Tensor:
        """The tokens with which the decoder begins, [windows, P]: for several languages, the one
        that the model hears.
        """
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
        with torch.no_grad(), loading.quiet():
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

    A file that fits one window is one. A longer one is cut into windows; which part of its text is
    said in which of them is not known, so that they have none.
    """
    for file in files:
        samples = read_audio(file.path, speech.rate)
        length = speech.window_samples
        if len(samples) <= length:
            yield Window(samples, file.text)
            continue
        for first in range(0, len(samples) - speech.rate, length):
            yield Window(samples[first : first + length], None)
