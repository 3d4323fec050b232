"""Checkpoints without a language-model head: verify proves them, and what needs a head says so in one line."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.verify import verify_checkpoint
from tests.helpers.own_files import SIZES
from tests.helpers.tiny import make_config, randomise
from tests.helpers.verification import details, edit, failed, flip, save_tokenizer


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


@pytest.mark.parametrize(
    ("model_type", "auto"),
    [
        ("llama", "AutoModel"),
        ("llama", "AutoModelForQuestionAnswering"),
        ("qwen3_moe", "AutoModelForSequenceClassification"),
        ("phi3", "AutoModel"),
        ("gpt2", "AutoModel"),
        ("gpt_neox", "AutoModelForSequenceClassification"),
        ("bloom", "AutoModelForTokenClassification"),
        ("t5", "AutoModel"),
        ("bart", "AutoModelForSequenceClassification"),
        ("t5", "AutoModelForQuestionAnswering"),
        ("whisper", "AutoModel"),
        ("llama", "AutoModelForCausalLM"),
    ],
)
def test_every_head_is_verified(tmp_path: Path, model_type: str, auto: str) -> None:
    source = save(tmp_path / "source", auto, model_type)
    convert_checkpoint(source, tmp_path / "out", 3, ConversionOptions(method="mean"))
    report = verify_checkpoint(tmp_path / "out", source)
    assert failed(report) == {}
    told = details(report)
    outputs = "logits" if auto == "AutoModelForCausalLM" else "hidden states"
    assert f"the spread of the {outputs}" in told[outputs]
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["architectures"][0]
    assert told["loads"].startswith(stated)
    assert {"cache heads", "cached decoding"} <= set(told)


@pytest.mark.parametrize("auto", ["AutoModel", "AutoModelForSequenceClassification"])
def test_faults_of_headless_checkpoints_are_found(tmp_path: Path, auto: str) -> None:
    source = save(tmp_path / "source", auto)
    out = tmp_path / "out"
    convert_checkpoint(source, out, 3, ConversionOptions(method="mean"))
    names = load_file(out / "model.safetensors")
    (key,) = [name for name in names if name.endswith("layers.1.self_attn.k_proj.weight")]
    edit(out, key, flip(5))
    assert set(failed(verify_checkpoint(out, source))) == {"merged tensors"}
    edit(out, key, lambda tensor: tensor.flip(0))
    assert set(failed(verify_checkpoint(out, source))) == {"merged tensors"}  # OUT computes with its own heads
    down = key.replace("self_attn.k_proj", "mlp.down_proj")
    edit(out, down, lambda tensor: tensor * 1.05)
    assert {"untouched tensors", "hidden states"} <= set(failed(verify_checkpoint(out, source)))
    edit(out, down, lambda _: None)
    assert {"tensor names", "untouched tensors", "loads"} <= set(failed(verify_checkpoint(out, source)))
