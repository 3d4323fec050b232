"""Folders of sound, and the batches that a model which hears is calibrated on."""

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from transformers import Speech2TextFeatureExtractor

from gqa_convert.conversion.calibration.speech import draw_speech
from gqa_convert.conversion.calibration.streams import Calibration, Request
from gqa_convert.data.speech import (
    AudioFile,
    SpeechModel,
    cut_windows,
    list_audio_files,
    read_audio,
)
from gqa_convert.errors import DataError
from gqa_convert.families.loading import load_model
from tests.helpers.data_helpers import demo_tokenizer
from tests.helpers.speech import RATE, hearing_model, sound_folder, write_sound


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> SpeechModel:
    folder = hearing_model(tmp_path_factory.mktemp("hearing") / "model")
    model, missing = load_model(folder, torch.float32)
    assert not missing
    return SpeechModel(model, folder)


def test_an_encoder_that_reads_any_length_is_refused(speech: SpeechModel, tmp_path: Path) -> None:
    demo_tokenizer().save_pretrained(tmp_path)
    Speech2TextFeatureExtractor().save_pretrained(tmp_path)
    with pytest.raises(DataError, match="reads sounds of any length"):
        SpeechModel(speech.model, tmp_path)


def test_texts_come_from_the_metadata(tmp_path: Path) -> None:
    folder = sound_folder(tmp_path / "sounds", 3)
    stated = list_audio_files(folder)
    assert [file.text for file in stated] == [
        "sound 0 def",
        "sound 1 def return",
        "sound 2 def return import",
    ]
    (folder / "metadata.jsonl").unlink()
    assert list_audio_files(folder) == [AudioFile(file.path, None) for file in stated]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ('{"file_name": "gone.wav", "text": "a"}', "names gone.wav, which is not there"),
        ('{"text": "a"}', "names None, which is not there"),
        ('{"file_name": "00.wav", "label": "a"}', "states no text for 00.wav"),
        ("{", "line 1 is not JSON"),
        ("\n", "has no rows"),
        ('{"file_name": "00.wav", "text": "a"}\n' * 2, "names 00.wav, which a row before it names"),
        ('{"file_name": "00.wav", "text": "\udce9"}', "is not UTF-8"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(tmp_path: Path, metadata: str, message: str) -> None:
    folder = sound_folder(tmp_path / "sounds", 1)
    (folder / "metadata.jsonl").write_text(metadata + "\n", errors="surrogateescape")
    with pytest.raises(DataError, match=message):
        list_audio_files(folder)
    (tmp_path / "notes.txt").write_text("no sound")
    with pytest.raises(DataError, match="is no folder"):
        list_audio_files(tmp_path / "notes.txt")
    (folder / "metadata.jsonl").unlink()
    (folder / "00.wav").unlink()
    with pytest.raises(DataError, match="holds no audio files"):
        list_audio_files(folder)


def test_sound_of_another_rate_with_two_channels_is_the_same_sound(tmp_path: Path) -> None:
    write_sound(tmp_path / "mono.wav", 1.0)
    write_sound(tmp_path / "stereo.wav", 1.0, rate=44_100, channels=2)
    mono, stereo = (read_audio(tmp_path / name, RATE) for name in ("mono.wav", "stereo.wav"))
    assert abs(len(stereo) - RATE) <= 1
    assert mono.dtype == stereo.dtype == np.float32
    loudest = [np.abs(np.fft.rfft(samples[:RATE])).argmax() for samples in (mono, stereo)]
    assert loudest == [440, 440]


def test_sound_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.wav").write_bytes(b"RIFF1234WAVEnothing")
    write_sound(tmp_path / "short.wav", 0.1)
    soundfile.write(tmp_path / "nan.wav", np.full(RATE, np.nan), RATE, subtype="FLOAT")
    for name, message in {
        "broken": "can't be read as sound",
        "short": r"lasts 0\.10 seconds",
        "nan": "holds samples that are no finite numbers",
    }.items():
        with pytest.raises(DataError, match=rf"{name}\.wav {message}"):
            read_audio(tmp_path / f"{name}.wav", RATE)


def made(speech: SpeechModel, folder: Path) -> Calibration:
    return draw_speech(Request(folder, 10_000), "sounds", list_audio_files(folder), speech)


def test_batches_hold_what_the_encoder_makes_of_each_sound_and_its_text(
    tmp_path: Path, speech: SpeechModel
) -> None:
    folder = sound_folder(tmp_path / "sounds", 5)
    found = made(speech, folder)
    (batch,) = found.batches
    ids, encoded = batch["decoder_input_ids"], batch["encoder_outputs"]
    assert found.tokens == ids.numel()
    assert found.description == f"{ids.numel()} tokens of 5 sounds, texts as stated"
    by_length = sorted(
        list_audio_files(folder), key=lambda file: len(speech.text_tokens(file.text))
    )
    start = speech.model.generation_config.decoder_start_token_id
    for row, file in enumerate(by_length):
        tokens = [start, *speech.text_tokens(file.text)]
        assert ids[row].tolist() == tokens[: ids.shape[1]]
        features = speech.features(list(cut_windows([file], speech)))
        with torch.no_grad():
            expected = speech.model.get_encoder()(features).last_hidden_state[0]
        torch.testing.assert_close(encoded[row].float(), expected, rtol=0.01, atol=0.01)


def test_a_folder_without_texts_gets_those_that_the_model_writes(
    tmp_path: Path, speech: SpeechModel
) -> None:
    folder = sound_folder(tmp_path / "sounds", 2, texts=False)
    found = made(speech, folder)
    windows = list(cut_windows(list_audio_files(folder), speech))
    heard = [len(speech.text_tokens(text)) for text in speech.transcribe(speech.encode(windows))]
    most = speech.model.config.max_target_positions
    assert found.batches[0]["decoder_input_ids"].shape[1] == min(most, 1 + min(heard))
    assert "2 texts written by the source" in found.description
