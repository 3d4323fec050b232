"""Tiny random wrappers of every type: a decoder with 12 heads beside a vision tower, and inputs with an image."""

import functools
import json
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

HEADS, HEAD_DIM = 12, 8
IMAGE = 127

_SPECS = yaml.safe_load(Path(__file__).with_name("wrappers.yaml").read_text())
_TEXT: dict[str, Any] = _SPECS.pop("text")
WRAPPER_TYPES = tuple(_SPECS)
_INPUTS: dict[str, Any] = {
    "start": [],
    "tokens": 4,
    "pixels": "pixel_values",
    "shape": [1, 3, 16, 16],
    "marks": None,
}
_INPUTS |= {"given": {}, "ones": {}}
"""The inputs of most types."""


def make_wrapper(
    model_type: str, folder: Path, *, flat: bool = False, vocabulary: int = 128
) -> Path:
    """Save a tiny random wrapper.

    Args:
        model_type: of the wrapper.
        folder: the folder to make.
        flat: state the decoder's keys beside those of the wrapper, as early configs do.
        vocabulary: tokens of the decoder.
    """
    spec = _SPECS[model_type]
    text = _TEXT | {"model_type": spec["decoder"], "vocab_size": vocabulary} | spec.get("text", {})
    config = CONFIG_MAPPING[model_type](
        text_config=text, tie_word_embeddings=False, **spec["config"]
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.2 * noise) if parameter.dim() > 1 else parameter.add_(0.1 * noise)
    model.save_pretrained(folder)
    if flat:
        path = folder / "config.json"
        stated = json.loads(path.read_text())
        path.write_text(json.dumps(stated.pop("text_config") | stated))
    return folder


def load_wrapper(folder: Path) -> nn.Module:
    """The model in its own class."""
    loaded: nn.Module = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    return loaded


@functools.cache
def image_inputs(model_type: str) -> dict[str, torch.Tensor]:
    """Tokens around an image, and the image."""
    stated = _INPUTS | _SPECS[model_type].get("inputs", {})
    ids = torch.tensor([[3, 4, 5, *stated["start"], *[IMAGE] * stated["tokens"], 9, 10, 11, 12]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs[stated["pixels"]] = torch.randn(
        stated["shape"], generator=torch.Generator().manual_seed(1)
    )
    inputs |= {name: torch.tensor(value) for name, value in stated["given"].items()}
    inputs |= {name: torch.ones(shape, dtype=torch.long) for name, shape in stated["ones"].items()}
    if stated["marks"]:
        inputs[stated["marks"]] = (ids == IMAGE).long()
    if model_type == "gemma4":
        places = torch.stack(torch.meshgrid(torch.arange(6), torch.arange(6), indexing="xy"), -1)
        inputs["image_position_ids"] = places.reshape(1, 36, 2)
    return inputs


def merge_decoder_heads(model: nn.Module, groups: int) -> None:
    """Give every K/V head of a loaded wrapper's decoder the mean of its group."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            decoder = "language_model." in name or "text_model." in name
            if decoder and (".k_proj." in name or ".v_proj." in name):
                heads = parameter.view(groups, HEADS // groups, HEAD_DIM, *parameter.shape[1:])
                heads.copy_(heads.mean(1, keepdim=True).expand_as(heads).clone())
