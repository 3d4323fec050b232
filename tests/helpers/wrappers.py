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
IMAGE, _VISION_START = 127, 125
_IMAGE_SIZE = 16

_TEXT: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SPECS = yaml.safe_load(Path(__file__).with_name("wrappers.yaml").read_text())
WRAPPER_TYPES = tuple(_SPECS)
_IMAGE_TOKENS = dict.fromkeys(
    ("aya_vision", "cohere2_vision", "got_ocr2", "idefics3", "mllama", "smolvlm"), 1
) | dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision"), 10)
"""Tokens of the image, where they are not 4."""


def make_wrapper(model_type: str, folder: Path, *, flat: bool = False, vocabulary: int = 128) -> Path:
    """Save a tiny random wrapper.

    Args:
        model_type: of the wrapper.
        folder: the folder to make.
        flat: state the decoder's keys beside those of the wrapper, as early configs do.
        vocabulary: tokens of the decoder.
    """
    spec = _SPECS[model_type]
    text = _TEXT | {"model_type": spec["decoder"], "vocab_size": vocabulary} | spec.get("text", {})
    config = CONFIG_MAPPING[model_type](text_config=text, tie_word_embeddings=False, **spec["config"])
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.2 * noise) if parameter.dim() > 1 else parameter.add_(0.1 * noise)
    model.save_pretrained(folder)
    if flat:
        flatten(folder)
    return folder


def flatten(folder: Path) -> None:
    """Rewrite a config so that the decoder's keys stand beside those of the wrapper."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config.pop("text_config") | config))


def load_wrapper(folder: Path) -> nn.Module:
    """The model in its own class."""
    loaded: nn.Module = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    return loaded


@functools.cache
def image_inputs(model_type: str) -> dict[str, torch.Tensor]:
    """Tokens around an image, and the image."""
    generator = torch.Generator().manual_seed(1)
    qwen = model_type.startswith("qwen")
    image = [IMAGE] * _IMAGE_TOKENS.get(model_type, 4)
    ids = torch.tensor([[3, 4, 5, *([_VISION_START] if qwen else []), *image, 9, 10, 11, 12]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if qwen:
        pixels = torch.randn(16, 3 * 2 * 4 * 4, generator=generator)
        return inputs | {
            "pixel_values": pixels,
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
            "mm_token_type_ids": (ids == IMAGE).long(),
        }
    if model_type == "lfm2_vl":
        return inputs | {
            "pixel_values": torch.randn(1, 16, 48, generator=generator),
            "spatial_shapes": torch.tensor([[4, 4]]),
            "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long),
        }
    if model_type == "gemma4":
        places = torch.stack(torch.meshgrid(torch.arange(6), torch.arange(6), indexing="xy"), -1)
        return inputs | {
            "pixel_values": torch.randn(1, 36, 48, generator=generator),
            "image_position_ids": places.reshape(1, 36, 2),
            "mm_token_type_ids": (ids == IMAGE).long(),
        }
    if model_type == "mllama":
        return inputs | {
            "pixel_values": torch.randn(1, 1, 1, 3, _IMAGE_SIZE, _IMAGE_SIZE, generator=generator),
            "aspect_ratio_ids": torch.tensor([[1]]),
            "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.long),
        }
    size = 64 if model_type == "got_ocr2" else _IMAGE_SIZE
    patches = {"llava_next": (2,), "llava_next_video": (2,), "llava_onevision": (2,)}
    patches |= {"idefics2": (1,), "idefics3": (1,), "smolvlm": (1,)}
    pixels = torch.randn(1, *patches.get(model_type, ()), 3, size, size, generator=generator)
    inputs["pixel_values_images" if model_type == "video_llava" else "pixel_values"] = pixels
    if model_type in ("llava_next", "llava_next_video", "llava_onevision", "mistral3"):
        inputs["image_sizes"] = torch.tensor([[_IMAGE_SIZE, _IMAGE_SIZE]])
    if model_type in ("gemma3", "paligemma"):
        inputs["token_type_ids"] = (ids == IMAGE).long()
    return inputs


def merge_decoder_heads(model: nn.Module, groups: int) -> None:
    """Give every K/V head of a loaded wrapper's decoder the mean of its group."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            decoder = "language_model." in name or "text_model." in name
            if decoder and (".k_proj." in name or ".v_proj." in name):
                heads = parameter.view(groups, HEADS // groups, HEAD_DIM, *parameter.shape[1:])
                heads.copy_(heads.mean(1, keepdim=True).expand_as(heads).clone())


def image_batches(model_type: str, count: int) -> list[dict[str, torch.Tensor]]:
    """The inputs with an image, each before 12 other tokens."""
    batches = []
    for number in range(count):
        batch = image_inputs(model_type)
        text = torch.randint(3, 60, (1, 12), generator=torch.Generator().manual_seed(number))
        batch = batch | {"input_ids": torch.cat([batch["input_ids"], text], 1)}
        for name in {"attention_mask", "mm_token_type_ids"} & batch.keys():
            batch[name] = torch.cat([batch[name], torch.full((1, 12), int(name == "attention_mask"))], 1)
        batches.append(batch)
    return batches
