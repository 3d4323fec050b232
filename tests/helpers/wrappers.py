"""Tiny random wrappers of every type: a decoder with 12 heads beside a vision tower or an
encoder, and their inputs.
"""

import functools
import json
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

HEADS, HEAD_DIM = 12, 8
IMAGE = 127

_SPECS = yaml.safe_load(Path(__file__).with_name("wrappers.yaml").read_text())
_TEXT: dict[str, Any] = _SPECS.pop("text")
WRAPPER_TYPES = tuple(_SPECS)
PICTURE_TYPES = tuple(name for name in _SPECS if "section" not in _SPECS[name])
"""Those that look at pictures beside text; the others are encoder-decoders."""
_INPUTS: dict[str, Any] = {
    "start": [],
    "tokens": 4,
    "pixels": "pixel_values",
    "shape": [1, 3, 16, 16],
    "marks": None,
    "left_out": [],
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
    values = {spec.get("section", "text_config"): text, "tie_word_embeddings": False}
    config = CONFIG_MAPPING[model_type](**values, **spec["config"])
    torch.manual_seed(0)
    auto = getattr(transformers, spec.get("auto", "AutoModelForImageTextToText"))
    model = auto.from_config(config)
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
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    loaded: nn.Module = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32)
    return loaded.eval()


@functools.cache
def image_inputs(model_type: str) -> dict[str, torch.Tensor]:
    """Tokens around an image, and the image; or the inputs of an encoder and a decoder."""
    stated = _INPUTS | _SPECS[model_type].get("inputs", {})
    ids = torch.tensor([[3, 4, 5, *stated["start"], *[IMAGE] * stated["tokens"], 9, 10, 11, 12]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if stated["pixels"]:
        generator = torch.Generator().manual_seed(1)
        inputs[stated["pixels"]] = torch.randn(stated["shape"], generator=generator)
    inputs |= {name: torch.tensor(value) for name, value in stated["given"].items()}
    inputs |= {name: torch.ones(shape, dtype=torch.long) for name, shape in stated["ones"].items()}
    if stated["marks"]:
        inputs[stated["marks"]] = (ids == IMAGE).long()
    for name in stated["left_out"]:
        del inputs[name]
    if model_type == "gemma4":
        places = torch.stack(torch.meshgrid(torch.arange(6), torch.arange(6), indexing="xy"), -1)
        inputs["image_position_ids"] = places.reshape(1, 36, 2)
    return inputs


def merge_decoder_heads(model: nn.Module, groups: int) -> None:
    """Give every K/V head of a loaded wrapper's decoder the mean of its group."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            decoder = any(part in name for part in ("language_model.", "text_model.", ".decoder."))
            if decoder and (".k_proj." in name or ".v_proj." in name):
                heads = parameter.view(groups, HEADS // groups, HEAD_DIM, *parameter.shape[1:])
                heads.copy_(heads.mean(1, keepdim=True).expand_as(heads).clone())
