"""Speech as a model's input: batches of sounds and what is said in them, for models that hear.

A batch holds `encoder_outputs`, what the encoder makes of windows of 30 seconds padded with silence, [windows, positions,
hidden_size] in bfloat16, and `decoder_input_ids` of their texts, cut to one length: sounds are sorted by the length of
their texts first, so that little is lost. The encoder runs once for each window, because no conversion changes it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gqa_convert.checkpoint.machine import available_memory
from gqa_convert.checkpoint.mapped_tensors import mapped
from gqa_convert.data.order import mix, permuted
from gqa_convert.errors import DataError
from gqa_convert.families.loading import SOUND_POSITIONS, load_tokenizer, no_warnings
from gqa_convert.text.audio_files import AudioFile, Samples, read_audio

_PER_HIDDEN = 12
_AT_ONCE = 16
"""Windows of a batch."""
_TASK = "transcribe"
_PREPROCESSOR = "preprocessor_config.json"

Batch = dict[str, Tensor]


def speech_tokens_for(config: Mapping[str, Any]) -> int:
    """The default number of tokens of text: 12 per hidden dimension, some 240 sentences for Whisper base.

    Each comes with hundreds of positions of sound, on which the keys and values of cross-attention are fitted.
    """
    return _PER_HIDDEN * int(config["d_model"])


@dataclass(frozen=True, slots=True)
class Window:
    """A sound of at most one window of the encoder, and what is said in it; None before the source has written it."""

    samples: Samples
    text: str | None


class SpeechModel:
    """A loaded speech model with its tokenizer and its feature extractor.

    Args:
        model: a loaded model.
        folder: its checkpoint.

    Attributes:
        notes: sentences on what the checkpoint lacks.
    """

    def __init__(self, model: Any, folder: Path) -> None:
        from transformers import AutoFeatureExtractor, WhisperFeatureExtractor

        self.model = model
        self.tokenizer = load_tokenizer(folder)
        self.notes: list[str] = []
        if (folder / _PREPROCESSOR).is_file():
            self._extractor = AutoFeatureExtractor.from_pretrained(folder)
        else:
            seconds = model.config.max_source_positions // SOUND_POSITIONS
            self._extractor = WhisperFeatureExtractor(model.config.num_mel_bins, chunk_length=seconds)
            self.notes.append(f"{folder} has no {_PREPROCESSOR}: the features are those of the type by default")
        self.rate: int = self._extractor.sampling_rate

    @property
    def window_samples(self) -> int:
        """The samples of a window, which the encoder always reads whole."""
        return int(self._extractor.n_samples)

    def features(self, windows: Sequence[Window]) -> Tensor:
        """The encoder's input, [windows, mel bins, frames], float32."""
        sounds = [window.samples for window in windows]
        made: Tensor = self._extractor(sounds, sampling_rate=self.rate, return_tensors="pt").input_features
        return made

    def text_tokens(self, text: str) -> list[int]:
        """The tokens of a text that is said, and the one that ends it; none for a text without words."""
        ids: list[int] = self.tokenizer(f" {text}", add_special_tokens=False)["input_ids"] if text else []
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
        start = torch.full((len(encoded), 1), generation.decoder_start_token_id)
        further = []
        if self._is_multilingual:
            with torch.no_grad():
                languages = self.model.detect_language(encoder_outputs=self._encoder_outputs(encoded))
            task = torch.full_like(start, generation.task_to_id[_TASK])
            further = [languages.cpu()[:, None], task]
        if getattr(generation, "no_timestamps_token_id", None) is not None:
            further.append(torch.full_like(start, generation.no_timestamps_token_id))
        return torch.cat([start, *further], dim=1)

    def transcribe(self, encoded: Tensor) -> list[str]:
        """What the model hears, by greedy search."""
        options: dict[str, Any] = {"num_beams": 1, "do_sample": False}
        options["max_new_tokens"] = self.model.config.max_target_positions // 2
        if self._is_multilingual:
            options["task"] = _TASK
        with torch.no_grad(), no_warnings():
            ids = self.model.generate(encoder_outputs=self._encoder_outputs(encoded), **options)
        texts: list[str] = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return [text.strip() for text in texts]

    @property
    def _is_multilingual(self) -> bool:
        return bool(getattr(self.model.generation_config, "is_multilingual", False))

    def _encoder_outputs(self, encoded: Tensor) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=encoded.to(self.model.device, self.model.dtype))


def cut_windows(files: Sequence[AudioFile], speech: SpeechModel) -> Iterator[Window]:
    """The windows of files, one file after the other.

    A file that fits one window is one. A longer one is cut into windows; which part of its text is said in which of
    them is not known, so that they have none.
    """
    for file in files:
        samples = read_audio(file.path, speech.rate)
        if len(samples) <= speech.window_samples:
            yield Window(samples, file.text)
            continue
        for first in range(0, len(samples) - speech.rate, speech.window_samples):
            yield Window(samples[first : first + speech.window_samples], None)


class Keeper:
    """Keeps tensors in memory until they take a quarter of what is free, and further ones in mapped files in the folder
    for temporary files.
    """

    def __init__(self) -> None:
        free = available_memory(torch.device("cpu"))
        self._left = None if free is None else free // 4

    def keep(self, tensor: Tensor) -> Tensor:
        """The tensor, or its copy in a file."""
        if self._left is None:
            return tensor
        self._left -= tensor.nbytes
        return tensor if self._left >= 0 else mapped(tensor, Path(gettempdir()))


@dataclass(frozen=True, slots=True)
class SpokenText:
    """A window as the model takes it: what its encoder makes of it, [positions, hidden_size], and the decoder's tokens, [length],
    with the prompt."""

    encoded: Tensor
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class SpeechSize:
    """How many tokens of text are wanted of each part; those of the prompts count."""

    layers: int
    held_out: int
    fresh: int

    @property
    def total(self) -> int:
        return self.layers + self.held_out + self.fresh


@dataclass(frozen=True, slots=True)
class Speech:
    """Batches of speech.

    Attributes:
        layers: for the layers, keyword arguments of the model's forward pass.
        held_out: of other windows, for evaluation.
        fresh: of still other windows.
        tokens: of text in `layers`.
        length: tokens of the longest text in them.
        files: how many files were read.
        seconds: how long all windows last together.
        written: how many of the texts the model wrote itself.
    """

    layers: list[Batch]
    held_out: list[Batch]
    fresh: list[Batch]
    tokens: int
    length: int
    files: int
    seconds: float
    written: int

    def description(self) -> str:
        """What was heard, in words."""
        by = "texts as stated"
        if self.written:
            by = f"{self.written} texts written by the source"
        return f"{self.tokens} tokens of speech: {self.seconds / 3600:.2f} hours in {self.files} files, {by}"


def speech_batches(
    speech: SpeechModel,
    files: Sequence[AudioFile],
    size: SpeechSize,
    *,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
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
        OSError: the disk of temporary files is full.
    """
    order = [files[permuted(number, len(files), mix(seed, 5))] for number in range(len(files))]
    counts = {"files": 0, "samples": 0, "written": 0}

    def counted() -> Iterator[Window]:
        for file in order:
            counts["files"] += 1
            for window in cut_windows([file], speech):
                counts["samples"] += len(window.samples)
                counts["written"] += window.text is None
                yield window

    found: list[SpokenText] = []
    tokens = 0
    keeper = Keeper()
    for windows in _grouped(counted()):
        for spoken in _spoken(speech, windows, keeper):
            found.append(spoken)
            tokens += len(spoken.tokens)
        progress(min(tokens, size.total), size.total)
        if tokens >= size.total:
            break
    if not found:
        raise DataError("the model hears no word in any of the files: name a folder of speech")
    layers, held_out, fresh = (_batches(part, keeper) for part in _divided(found, size))
    return Speech(
        layers,
        held_out,
        fresh,
        tokens=sum(batch["decoder_input_ids"].numel() for batch in layers),
        length=max(batch["decoder_input_ids"].shape[1] for batch in layers),
        files=counts["files"],
        seconds=counts["samples"] / speech.rate,
        written=counts["written"],
    )


def _grouped(windows: Iterator[Window]) -> Iterator[list[Window]]:
    group: list[Window] = []
    for window in windows:
        group.append(window)
        if len(group) == _AT_ONCE:
            yield group
            group = []
    if group:
        yield group


def _spoken(speech: SpeechModel, windows: Sequence[Window], keeper: Keeper) -> Iterator[SpokenText]:
    """Windows with their texts as tokens; those in which nothing is said are left out."""
    encoded = speech.encode(windows)
    kept = keeper.keep(encoded.to("cpu", torch.bfloat16))
    prompts = speech.prompts(encoded)
    texts = [window.text for window in windows]
    missing = [number for number, text in enumerate(texts) if text is None]
    if missing:
        heard = speech.transcribe(encoded[missing])
        for number, written in zip(missing, heard, strict=True):
            texts[number] = written
    most = speech.model.config.max_target_positions
    for number, text in enumerate(texts):
        ids = speech.text_tokens(text or "")
        if ids:
            tokens = torch.cat([prompts[number], torch.tensor(ids)])
            yield SpokenText(kept[number], tokens[:most])


def _divided(found: list[SpokenText], size: SpeechSize) -> tuple[list[SpokenText], ...]:
    """The first windows for the layers, the next ones held out, and the rest. Where there are too few for the first two,
    one in nine is held out.
    """
    lengths = [len(spoken.tokens) for spoken in found]
    ends = np.cumsum(lengths)
    layers = int(np.searchsorted(ends, size.layers)) + 1
    judged = max(layers, int(np.searchsorted(ends, size.layers + size.held_out))) + 1
    if not size.held_out or len(found) == 1:
        judged = layers
    elif judged > len(found):
        layers = len(found) - max(1, len(found) // 9)
        judged = len(found)
    return found[:layers], found[layers:judged], found[judged:]


def _batches(found: Sequence[SpokenText], keeper: Keeper) -> list[Batch]:
    """Batches of texts of about one length, cut to the shortest."""
    by_length = sorted(found, key=lambda spoken: len(spoken.tokens))
    made = []
    for first in range(0, len(by_length), _AT_ONCE):
        group = by_length[first : first + _AT_ONCE]
        length = len(group[0].tokens)
        ids = torch.stack([spoken.tokens[:length] for spoken in group])
        encoded = keeper.keep(torch.stack([spoken.encoded for spoken in group]))
        made.append({"encoder_outputs": encoded, "decoder_input_ids": ids})
    return made
