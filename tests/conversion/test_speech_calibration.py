"""Converting a model that hears on a folder of sound."""

import json
from pathlib import Path

import pytest
import torch

from gqa_convert.conversion.calibration.speech import draw_speech
from gqa_convert.conversion.calibration.streams import Request, digest_of
from gqa_convert.conversion.options import CalibrationOptions, ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.data.speech import SpeechModel, list_audio_files
from gqa_convert.errors import DataError, OptionError
from gqa_convert.families.loading import load_model
from tests.helpers.speech import hearing_model, sound_folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hearing_model(tmp_path_factory.mktemp("hearing") / "model")


def options(**calibration: object) -> ConversionOptions:
    return ConversionOptions(calibration=CalibrationOptions(steps=3, kl_steps=0, **calibration))  # type: ignore[arg-type]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_model(folder, torch.float32)[0].state_dict()  # type: ignore[no-any-return]


def test_the_decoder_is_fitted_on_what_is_said_in_a_folder(tmp_path: Path, source: Path) -> None:
    folder = sound_folder(tmp_path / "sounds", 40)
    converted = convert_checkpoint(
        source, tmp_path / "folder", 3, options(source=str(folder), tokens=200)
    )
    assert converted.calibration is not None
    speech = SpeechModel(load_model(source, torch.float32)[0], source)
    drawn = draw_speech(Request(source, 200, 25), "sounds", list_audio_files(folder), speech)
    assert converted.calibration.digest == digest_of([], drawn.batches)
    assert converted.calibration.tokens == sum(
        batch["decoder_input_ids"].numel() for batch in drawn.batches
    )
    one = weights(tmp_path / "folder")
    changed = [name for name in one if "decoder" in name and "k_proj.weight" in name]
    assert len(changed) == 4  # self- and cross-attention of two layers
    record = json.loads((tmp_path / "folder" / "gqa_conversion.json").read_text())
    assert "sounds, texts as stated" in record["calibration"]["text"]
    encoder = [name for name in one if "encoder." in name]
    assert all(torch.equal(one[name], weights(source)[name]) for name in encoder)


def test_validation_is_not_of_the_longest_sentences(tmp_path: Path, source: Path) -> None:
    """Texts of about one length are together in a batch, and the last batches validate."""
    files = list_audio_files(sound_folder(tmp_path / "sounds", 80))
    speech = SpeechModel(load_model(source, torch.float32)[0], source)
    places = set()
    for seed in range(4):
        drawn = draw_speech(Request(source, 600, seed=seed), "sounds", files, speech)
        lengths = [batch["decoder_input_ids"].shape[1] for batch in drawn.batches]
        assert len(lengths) > 2
        places.add(lengths.index(max(lengths)))
    assert len(places) > 1


def test_what_is_no_folder_of_sound_is_refused_before_anything_is_written(
    tmp_path: Path, source: Path
) -> None:
    (tmp_path / "notes.txt").write_text("no sound")
    out = tmp_path / "out"
    with pytest.raises(DataError, match="is no folder"):
        convert_checkpoint(source, out, 3, options(source=str(tmp_path / "notes.txt")))
    with pytest.raises(DataError, match="holds no audio files"):
        convert_checkpoint(source, out, 3, options(source=str(tmp_path)))
    with pytest.raises(OptionError, match="--calibration-length is for text"):
        convert_checkpoint(source, out, 3, options(source=str(tmp_path), sequence_length=64))
    assert not out.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
