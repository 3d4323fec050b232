"""Inputs and targets of a model that hears: spoken windows, and the texts of which each is scored."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from gqa_convert.errors import DataError
from gqa_convert.text.audio_files import AudioFile
from gqa_convert.text.scoring.material import Batch, Integers, Material
from gqa_convert.text.speech import SpeechModel, Window, cut_windows


class SpeechBatches:
    """Batches of windows, whose sound is read when a batch is looked at.

    Args:
        speech: makes features of sounds.
        files: one for each window.
        prompts: [windows, P], the tokens with which the decoder begins.
        targets: the tokens of each text.
        batch: windows at a time.
    """

    def __init__(
        self, speech: SpeechModel, files: Sequence[AudioFile], prompts: Integers, targets: list[Integers], batch: int
    ) -> None:
        self._speech, self._files, self._batch = speech, files, batch
        self._prompts, self._targets = prompts, targets
        lengths = np.array([len(target) for target in targets])
        self._firsts = np.cumsum(lengths) - lengths

    def __len__(self) -> int:
        return -(-len(self._files) // self._batch)

    def __getitem__(self, number: int) -> Batch:
        chosen = range(len(self._files))[number * self._batch : (number + 1) * self._batch]
        prompt = self._prompts.shape[1]
        width = prompt + max(len(self._targets[each]) for each in chosen) - 1
        decoder = np.zeros((len(chosen), width), np.int64)
        rows, places = [], []
        for row, each in enumerate(chosen):
            target = self._targets[each]
            decoder[row, :prompt] = self._prompts[each]
            decoder[row, prompt : prompt + len(target) - 1] = target[:-1]
            scored = np.arange(len(target))
            rows.append(row * width + prompt - 1 + scored)
            places.append(self._firsts[each] + scored)
        features = self._speech.features([_window(self._speech, self._files[each]) for each in chosen])
        inputs: dict[str, Any] = {"input_features": features.numpy(), "decoder_input_ids": decoder}
        targets = np.concatenate([self._targets[each] for each in chosen])
        return Batch(inputs, np.concatenate(rows), targets, np.concatenate(places))


def speech_material(speech: SpeechModel, files: Sequence[AudioFile], *, batch: int) -> Material:
    """The texts of sounds of one window each, and the inputs that predict them.

    Args:
        speech: a loaded model, which hears the language of each sound.
        files: with their texts.
        batch: windows at a time.

    Raises:
        DataError: a file has no text, or can't be read.
    """
    targets: list[Integers] = []
    prompts = []
    digest = hashlib.sha256()
    for first in range(0, len(files), batch):
        some = files[first : first + batch]
        windows = [_window(speech, file) for file in some]
        prompts.append(speech.prompts(speech.encode(windows)).numpy())
        for file, window in zip(some, windows, strict=True):
            targets.append(np.array(speech.text_tokens(file.text or "")))
            digest.update(window.samples.tobytes())
    found = SpeechBatches(speech, files, np.concatenate(prompts), targets, batch)
    ids = np.concatenate(targets)
    digest.update(ids.tobytes())
    blocks = np.repeat(np.arange(len(files)), [len(target) for target in targets])
    return Material(ids, np.ones(len(ids), np.bool_), None, blocks, len(files), found, digest.hexdigest())


def with_texts(speech: SpeechModel, files: Sequence[AudioFile]) -> list[AudioFile]:
    """Those files that last one window at most.

    Raises:
        DataError: a file has no text, or none is short enough.
    """
    if any(file.text is None for file in files):
        raise DataError(
            "the folder has no texts, with which models are compared: state them in metadata.jsonl, a line with file_name "
            "and text for each file"
        )
    found = [file for file in files if len(list(cut_windows([file], speech))) == 1]
    if not found:
        raise DataError("all sounds are longer than the encoder's window of 30 seconds: cut them into sentences")
    return found


def _window(speech: SpeechModel, file: AudioFile) -> Window:
    return next(cut_windows([file], speech))
