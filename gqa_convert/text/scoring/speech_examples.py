"""Inputs and targets of a model that hears: spoken windows, and the texts of which each is scored."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class HeardSpeech:
    """What is scored of a speech model.

    Attributes:
        material: the tokens of the texts, and the inputs that predict them.
        said: the texts.
        heard: what the model writes, by greedy search.
    """

    material: Material
    said: list[str]
    heard: list[str]


def hear(
    speech: SpeechModel,
    files: Sequence[AudioFile],
    *,
    batch: int,
    tokens: int | None,
    progress: Callable[[int, int], None],
) -> HeardSpeech:
    """Run a model on sounds with their texts. Those without words and those longer than the encoder's window are
    left out, and counted.

    Args:
        speech: the model, which hears the language of each sound too.
        files: with their texts.
        batch: sounds at a time.
        tokens: after how many tokens to stop; None for all files.
        progress: called with the number of files that are done, and of all.

    Raises:
        DataError: a file has no text or can't be read, or all are too long.
    """
    if any(file.text is None for file in files):
        raise DataError(
            "the folder has no texts, with which models are compared: state them in metadata.jsonl, a line with file_name "
            "and text for each file"
        )
    used: list[AudioFile] = []
    targets: list[Integers] = []
    prompts, heard = [], []
    left_out = 0
    digest = hashlib.sha256()
    for first in range(0, len(files), batch):
        windows = []
        for file in files[first : first + batch]:
            window = _window(speech, file)
            tokens_said = speech.text_tokens(window.text or "")
            if not tokens_said:
                left_out += 1
                continue
            windows.append(window)
            used.append(file)
            targets.append(np.array(tokens_said))
            digest.update(window.samples.tobytes())
        if windows:
            encoded = speech.encode(windows)
            prompts.append(speech.prompts(encoded).numpy())
            heard += speech.transcribe(encoded)
        progress(min(len(files), first + batch), len(files))
        if tokens is not None and sum(map(len, targets)) >= tokens:
            break
    if not used:
        raise DataError("all sounds are longer than the encoder's window: cut them into sentences")
    ids = np.concatenate(targets)
    digest.update(ids.tobytes())
    material = Material(
        ids,
        np.ones(len(ids), np.bool_),
        None,
        np.repeat(np.arange(len(used)), [len(target) for target in targets]),
        len(used),
        SpeechBatches(speech, used, np.concatenate(prompts), targets, batch),
        digest.hexdigest(),
        f"{left_out} sounds without words or longer than a window were left out" if left_out else None,
    )
    return HeardSpeech(material, [file.text or "" for file in used], heard)


def _window(speech: SpeechModel, file: AudioFile) -> Window:
    return next(cut_windows([file], speech))
