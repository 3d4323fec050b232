"""Runs of a model that hears, on folders of sound, against transformers' own losses."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from transformers import AutoModelForSpeechSeq2Seq, AutoTokenizer, WhisperFeatureExtractor

from gqa_convert import convert_checkpoint
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.data.spoken import decoder_prompt
from gqa_convert.errors import DataError, RecipeError
from gqa_convert.training.estimate import estimate, named_gpus
from tests.helpers.speech import WINDOW_SECONDS, hearing_model, sound_folder, write_sound
from tests.helpers.uptrain_runs import losses, recipe, run, weights

SOUNDS = 7
STEADY: dict[str, Any] = {"schedule": "constant", "warmup_steps": 0, "sequence_length": 40, "micro_batch_size": 3}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny Whisper, converted and not, and sounds with texts of different lengths."""
    folder = tmp_path_factory.mktemp("speech")
    hearing_model(folder / "whisper")
    convert_checkpoint(folder / "whisper", folder / "student", 4, ConversionOptions(method="mean"))
    sound_folder(folder / "sounds", SOUNDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield folder


def spoken(home: Path, output: Path, **keys: Any) -> Any:
    return run(home, output, **STEADY | {"data": str(home / "sounds"), "tokens": 60, "tokens_per_step": 60} | keys)


def test_the_loss_is_that_of_transformers(home: Path, tmp_path: Path) -> None:
    """One step over all sounds: the mean over the tokens of their texts and the ends."""
    rows = [json.loads(line) for line in (home / "sounds" / "metadata.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(home / "student")
    extractor = WhisperFeatureExtractor.from_pretrained(home / "student")
    model = AutoModelForSpeechSeq2Seq.from_pretrained(home / "whisper").eval()
    student = AutoModelForSpeechSeq2Seq.from_pretrained(home / "student", trust_remote_code=True).eval()
    total = count = read = 0
    for row in rows:
        sound, rate = soundfile.read(home / "sounds" / row["file_name"], dtype="float32")
        features = extractor(sound, sampling_rate=rate, return_tensors="pt").input_features
        ids = [*tokenizer(" " + row["text"])["input_ids"], tokenizer.eos_token_id]
        start = model.generation_config.decoder_start_token_id
        with torch.no_grad():
            logits = student(input_features=features, decoder_input_ids=torch.tensor([[start, *ids[:-1]]])).logits
        total += float(torch.nn.functional.cross_entropy(logits[0], torch.tensor(ids), reduction="sum"))
        count += len(ids)
        read += len(ids) + 1
    summary = spoken(home, tmp_path / "run", tokens=read, tokens_per_step=read)
    assert summary["steps"] == 1
    assert losses(tmp_path / "run") == [pytest.approx(total / count, rel=1e-5)]


def test_a_run_resumes_and_recovers(home: Path, tmp_path: Path) -> None:
    keys = {"teacher": str(home / "whisper"), "distillation_weight": 0.5, "evaluation_data": str(home / "sounds")}
    spoken(home, tmp_path / "run", **keys, tokens=180)
    summary = spoken(home, tmp_path / "run", **keys, tokens=480)
    spoken(home, tmp_path / "whole", **keys, tokens=480)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    assert summary["evaluation"]["final"] < summary["evaluation"]["start"]


def test_a_run_is_estimated(home: Path, tmp_path: Path) -> None:
    found = estimate(recipe(home, tmp_path / "run", **STEADY, data=str(home / "sounds")), [], named_gpus(1, "h100"))
    model = AutoModelForSpeechSeq2Seq.from_pretrained(home / "student", trust_remote_code=True)
    assert found.parameters["all"] == sum(parameter.numel() for parameter in model.parameters())
    assert found.flops > 0


def test_what_is_refused(home: Path, tmp_path: Path) -> None:
    sound_folder(tmp_path / "untold", 2, texts=False)
    sound_folder(tmp_path / "long", 1)
    write_sound(tmp_path / "long" / "00.wav", WINDOW_SECONDS + 0.5)
    pairs = {"source": str(home / "sounds"), "source_field": "a", "target_field": "b"}
    for data, problem, message in (
        (str(tmp_path / "untold"), DataError, "states no texts: training on speech needs a metadata.jsonl"),
        (str(tmp_path / "long"), DataError, r"00.wav lasts 2.5 seconds, and the model hears 2 at once"),
        (str(tmp_path / "missing"), DataError, "is no folder"),
        ({"source": str(home / "sounds"), "language": "en"}, DataError, "the source states the language en, and"),
        (pairs, RecipeError, "is a model that hears: use the objective speech, on running text"),
    ):
        with pytest.raises(problem, match=message):
            spoken(home, tmp_path / "run", data=data)


def test_the_decoder_begins_as_the_checkpoint_states(tmp_path: Path) -> None:
    stated = {
        "is_multilingual": True,
        "lang_to_id": {"<|de|>": 7, "<|en|>": 6},
        "task_to_id": {"transcribe": 8},
        "no_timestamps_token_id": 9,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    assert decoder_prompt(tmp_path, 5, "de") == [5, 7, 8, 9]
    with pytest.raises(
        DataError, match="the language of the speech is None: set `language` of the source to one of de, en"
    ):
        decoder_prompt(tmp_path, 5, None)
    (tmp_path / "generation_config.json").write_text(json.dumps({"no_timestamps_token_id": 9}))
    assert decoder_prompt(tmp_path, 5, None) == [5, 9]
