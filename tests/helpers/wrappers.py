"""Tiny random wrappers of every type: a decoder with 12 heads beside a vision tower, and inputs with an image."""

import functools
from pathlib import Path
from typing import Any

import torch
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
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _tower(model_type: str, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {"model_type": model_type, **sizes, "image_size": _IMAGE_SIZE, "patch_size": 8, **more}


_CLIP = {"vision_config": _tower("clip_vision_model", projection_dim=32), "image_token_index": IMAGE}
_SIGLIP = {"vision_config": _tower("siglip_vision_model"), "image_token_index": IMAGE}
_GRID = {"image_grid_pinpoints": [[_IMAGE_SIZE, _IMAGE_SIZE]]}
_ALIGNED = {"downsample_factor": 2, "alignment_intermediate_size": 64}
_QWEN_TOWER = {"depth": 2, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2}
_QWEN = {"image_token_id": IMAGE, "video_token_id": 126, "vision_start_token_id": _VISION_START}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}

_QWEN3 = {
    "vision_config": _QWEN_TOWER
    | {
        "hidden_size": 32,
        "out_hidden_size": 96,
        "intermediate_size": 48,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    },
    **_QWEN,
}
_SPARSE = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

_SPECS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "aya_vision": ("cohere2", _SIGLIP | _ALIGNED, {}),
    "aria": (
        "aria_text",
        {
            "vision_config": _tower("idefics3_vision"),
            "image_token_index": IMAGE,
            "projector_patch_to_query_dict": {4: 4},
        },
        {"moe_num_experts": 2, "moe_topk": 1, "moe_num_shared_experts": 1},
    ),
    "cohere2_vision": (
        "cohere2",
        {"vision_config": _tower("siglip_vision_model"), "image_token_id": IMAGE} | _ALIGNED,
        {},
    ),
    "gemma4": (
        "gemma4_text",
        {
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "head_dim": 8,
                "patch_size": 4,
                "position_embedding_size": 16,
            },
            "audio_config": None,
            "image_token_id": IMAGE,
            "boi_token_id": 125,
            "eoi_token_id": 126,
        },
        {
            "global_head_dim": HEAD_DIM,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 128,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gemma3": ("gemma3_text", _SIGLIP | {"mm_tokens_per_image": 4, "boi_token_index": 125, "eoi_token_index": 126}, {}),
    "got_ocr2": (
        "qwen2",
        {
            "vision_config": {
                "hidden_size": 32,
                "output_channels": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 64,
                "patch_size": 16,
                "window_size": 2,
                "global_attn_indexes": [1],
                "mlp_dim": 48,
            },
            "image_token_index": IMAGE,
        },
        {},
    ),
    "idefics2": (
        "mistral",
        {
            "vision_config": _tower("idefics2_vision"),
            "perceiver_config": {
                "hidden_size": 96,
                "resampler_n_latents": 4,
                "resampler_depth": 1,
                "resampler_n_heads": 4,
                "resampler_head_dim": 8,
                "num_key_value_heads": 2,
            },
            "image_token_id": IMAGE,
        },
        {},
    ),
    "idefics3": ("llama", {"vision_config": _tower("idefics3_vision"), "image_token_id": IMAGE, "scale_factor": 2}, {}),
    "internvl": (
        "qwen2",
        {
            "vision_config": _tower("internvl_vision") | {"image_size": [_IMAGE_SIZE] * 2, "patch_size": [4, 4]},
            "image_token_id": IMAGE,
            "downsample_ratio": 0.5,
        },
        {},
    ),
    "lfm2_vl": (
        "lfm2",
        {
            "vision_config": _tower("siglip2_vision_model") | {"num_patches": 16, "patch_size": 4},
            "image_token_id": IMAGE,
            "downsample_factor": 2,
            "projector_hidden_size": 32,
        },
        {"layer_types": ["conv", "full_attention"]},
    ),
    "llava": ("llama", _CLIP, {}),
    "llava_next": ("mistral", _CLIP | _GRID, {}),
    "llava_next_video": ("llama", _CLIP | _GRID | {"video_token_index": 126}, {}),
    "llava_onevision": ("qwen2", _SIGLIP | _GRID | {"video_token_index": 126}, {}),
    "mistral3": (
        "mistral",
        {"vision_config": _tower("pixtral"), "image_token_index": IMAGE, "spatial_merge_size": 1},
        {},
    ),
    "mllama": (
        "mllama_text_model",
        {
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_global_layers": 1,
                "attention_heads": 4,
                "image_size": _IMAGE_SIZE,
                "patch_size": 8,
                "max_num_tiles": 1,
                "vision_output_dim": 64,
                "intermediate_layers_indices": [0],
                "supported_aspect_ratios": [[1, 1]],
            },
            "image_token_index": IMAGE,
        },
        {"cross_attention_layers": [1]},
    ),
    "paligemma": ("gemma", _SIGLIP | {"projection_dim": 96, "hidden_size": 96}, {}),
    "qwen2_5_vl": (
        "qwen2_5_vl_text",
        {
            "vision_config": _QWEN_TOWER
            | {"hidden_size": 32, "out_hidden_size": 96, "intermediate_size": 48, "fullatt_block_indexes": [1]},
            **_QWEN,
        },
        _MROPE,
    ),
    "qwen2_vl": (
        "qwen2_vl_text",
        {"vision_config": _QWEN_TOWER | {"embed_dim": 32, "hidden_size": 96, "mlp_ratio": 2}, **_QWEN},
        _MROPE,
    ),
    "qwen3_vl": ("qwen3_vl_text", _QWEN3, _MROPE),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", _QWEN3, _MROPE | _SPARSE),
    "smolvlm": ("llama", {"vision_config": _tower("smolvlm_vision"), "image_token_id": IMAGE, "scale_factor": 2}, {}),
    "video_llava": ("llama", _CLIP | {"video_token_index": 126}, {}),
    "vipllava": ("llama", _CLIP | {"vision_feature_layers": [-1, -2]}, {}),
}

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
    decoder, fields, text = _SPECS[model_type]
    config = CONFIG_MAPPING[model_type](
        text_config=_TEXT | {"model_type": decoder, "vocab_size": vocabulary} | text,
        tie_word_embeddings=False,
        **fields,
    )
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
    import json

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
