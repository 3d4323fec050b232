"""Checkpoints that were saved without a language-model head."""

from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import NoLanguageModelError
from gqa_convert.verify import verify_checkpoint
from tests.helpers.own_files import SIZES
from tests.helpers.tiny import make_config, randomise
from tests.helpers.verification import failed, save_tokenizer


def save(folder: Path, auto: str, model_type: str = "llama") -> Path:
    """A tiny model of an auto class, and a tokenizer."""
    if model_type in SIZES:
        config = CONFIG_MAPPING[model_type](**SIZES[model_type])
    else:
        config = make_config(model_type, pad_token_id=None)
    model = getattr(transformers, auto).from_config(config, dtype=torch.float32).eval()
    randomise(model)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.mark.parametrize("model_type", ["gpt2", "t5", "whisper"])
def test_layers_whose_head_is_tied_are_a_language_model(tmp_path: Path, model_type: str) -> None:
    source = save(tmp_path / "source", "AutoModel", model_type)
    convert_checkpoint(source, tmp_path / "out", 3, ConversionOptions(method="mean"))
    assert failed(verify_checkpoint(tmp_path / "out", source)) == {}


@pytest.mark.parametrize(
    ("model_type", "auto"),
    [
        ("llama", "AutoModelForQuestionAnswering"),
        ("qwen3_moe", "AutoModelForSequenceClassification"),
        ("bloom", "AutoModelForTokenClassification"),
        ("bart", "AutoModelForSequenceClassification"),
    ],
)
def test_other_heads_are_refused(tmp_path: Path, model_type: str, auto: str) -> None:
    source = save(tmp_path / "source", auto, model_type)
    with pytest.raises(
        NoLanguageModelError,
        match="has no language-model head: a K/V cache serves to generate text",
    ):
        convert_checkpoint(source, tmp_path / "out", 3, ConversionOptions(method="mean"))
