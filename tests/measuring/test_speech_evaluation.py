"""evaluate on folders of sound: losses, divergences and word errors."""

from pathlib import Path

import numpy as np
import pytest
import torch

from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.data.audio_files import list_audio_files
from gqa_convert.data.sources import Source
from gqa_convert.data.speech import SpeechModel, cut_windows
from gqa_convert.families.loading import load_model
from gqa_convert.measuring.evaluation.comparison import word_errors
from gqa_convert.measuring.evaluation.run import EvaluationOptions, evaluate
from gqa_convert.measuring.tables import evaluation_tables
from tests.helpers.speech import WINDOW_SECONDS, hearing_model, sound_folder, write_sound


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hearing_model(tmp_path_factory.mktemp("hearing") / "source")


def test_words_are_counted_without_case_and_punctuation() -> None:
    errors, words = word_errors(["Don't stop, Anna.", "one two"], ["don't  STOP anna", "one three four"])
    assert errors.tolist() == [0, 2]
    assert words.tolist() == [3, 2]


def test_a_result_is_scored_beside_its_source(tmp_path: Path, source: Path) -> None:
    merged = tmp_path / "merged"
    convert_checkpoint(source, merged, 3, ConversionOptions(method="mean"))
    folder = sound_folder(tmp_path / "sounds", 5)
    write_sound(folder / "00.wav", WINDOW_SECONDS + 1)  # longer than a window
    options = EvaluationOptions(reference=str(source), batch=3)
    found = evaluate([str(merged)], Source(str(folder)), options)
    assert found.objective == "speech"
    assert found.reference is not None
    (scores,) = found.results

    speech = SpeechModel(load_model(source, torch.float32)[0], source)
    losses = []
    for file in list_audio_files(folder)[1:]:
        tokens = speech.text_tokens(file.text or "")
        start = speech.model.generation_config.decoder_start_token_id
        features = speech.features(list(cut_windows([file], speech)))
        with torch.no_grad():
            logits = speech.model(features, decoder_input_ids=torch.tensor([[start, *tokens[:-1]]])).logits[0]
        losses += torch.nn.functional.cross_entropy(logits, torch.tensor(tokens), reduction="none").tolist()
    assert found.reference.tokens == scores.tokens == len(losses)
    assert scores.note == "1 sounds without words or longer than a window were left out"
    assert found.reference.loss == pytest.approx(float(np.mean(losses)), rel=1e-4)
    assert found.reference.kl is None or found.reference.kl == pytest.approx(0, abs=1e-6)
    assert (scores.kl or 0.0) > 0
    assert scores.difference is not None
    assert scores.difference.loss == pytest.approx((scores.loss or 0) - found.reference.loss, rel=1e-6)
    assert scores.word_error_rate is not None
    assert scores.difference.word_error_rate == pytest.approx(
        scores.word_error_rate - (found.reference.word_error_rate or 0)
    )
    (table,) = evaluation_tables(found, found.entries(), {str(source): "source", str(merged): "merged"})
    assert "word errors" in table.rows[0]
