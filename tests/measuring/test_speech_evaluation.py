"""evaluate on folders of sound: losses, divergences and word errors."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.whisper.english_normalizer import (
    BasicTextNormalizer,
    EnglishTextNormalizer,
)

from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.data.sources import Source
from gqa_convert.data.speech import SpeechModel, cut_windows, list_audio_files
from gqa_convert.families.loading import load_model
from gqa_convert.measuring.evaluation.run import EvaluationOptions, evaluate
from gqa_convert.measuring.evaluation.scoring import word_errors
from gqa_convert.measuring.tables import evaluation_tables
from tests.helpers.speech import WINDOW_SECONDS, hearing_model, sound_folder, write_sound


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hearing_model(tmp_path_factory.mktemp("hearing") / "source")


def test_words_are_counted_as_papers_count_them() -> None:
    """In English: without case, punctuation and hesitations; contractions, numbers and spellings
    are one.
    """
    normal = EnglishTextNormalizer({"colour": "color"})
    said = ["Don't stop, Anna.", "anna ran", "twenty-five colours", "Mr. Hmm, it's colour", "Hmm!"]
    heard = ["do not  STOP anna", "anna sat still", "25 colours", "mister it is color", "two words"]
    errors, words = word_errors(list(zip(said, heard, strict=True)), normal)
    assert errors.tolist() == [0, 2, 0, 0, 2]
    assert words.tolist() == [4, 2, 2, 4, 0]


@pytest.mark.parametrize(
    ("language", "kind"), [("en", EnglishTextNormalizer), ("de", BasicTextNormalizer)]
)
def test_the_normaliser_is_that_of_the_language_that_the_first_model_hears(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, language: str, kind: type
) -> None:
    used: list[str] = []
    monkeypatch.setattr(kind, "__call__", lambda _, text: used.append(text) or text)
    heard = iter([language] * 2 + ["fr"] * 2)

    codes = {"<|en|>": 5, "<|de|>": 6, "<|fr|>": 7}
    model = shutil.copytree(source, tmp_path / "model")
    generation = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(
        json.dumps(generation | {"_from_model_config": False, "lang_to_id": codes})
    )

    def prompts(_: SpeechModel, encoded: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[0, codes[f"<|{next(heard)}|>"]] for _ in encoded])

    monkeypatch.setattr(SpeechModel, "prompts", prompts)
    folder = sound_folder(tmp_path / "sounds", 2)
    found = evaluate([str(model), str(model)], Source(str(folder)), EvaluationOptions(batch=1))
    assert len(used) == 8, "said and heard by each model, in two sounds"
    assert found.results[0].word_error_rate is not None


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
        tokens = speech.text_tokens(file.text)
        start = speech.model.generation_config.decoder_start_token_id
        features = speech.features(list(cut_windows([file], speech)))
        with torch.no_grad():
            logits = speech.model(
                features, decoder_input_ids=torch.tensor([[start, *tokens[:-1]]])
            ).logits[0]
        losses += torch.nn.functional.cross_entropy(
            logits, torch.tensor(tokens), reduction="none"
        ).tolist()
    assert found.reference.tokens == scores.tokens == len(losses)
    assert scores.note == "1 sounds without words or longer than a window were left out"
    assert found.reference.loss == pytest.approx(float(np.mean(losses)), rel=1e-4)
    assert found.reference.kl is None or found.reference.kl == pytest.approx(0, abs=1e-6)
    assert (scores.kl or 0.0) > 0
    assert scores.difference is not None
    assert scores.difference.loss == pytest.approx(
        (scores.loss or 0) - found.reference.loss, rel=1e-6
    )
    assert scores.word_error_rate is not None
    assert scores.difference.word_error_rate == pytest.approx(
        scores.word_error_rate - (found.reference.word_error_rate or 0)
    )
    (table,) = evaluation_tables(
        found, found.entries(), {str(source): "source", str(merged): "merged"}
    )
    assert "word errors" in table.rows[0]
