"""The formats of weight files: which set of files is read, and which formats are refused."""

import json
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from typing import Any

from gqa_convert.errors import SourceNotFoundError, UnsupportedFormatError

SAFETENSORS_SINGLE = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
TORCH_SINGLE = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"

_PREFERENCE = (SAFETENSORS_SINGLE, SAFETENSORS_INDEX, TORCH_SINGLE, TORCH_INDEX)
"""The order in which transformers looks for weights."""

_WEIGHT_PATTERNS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.safetensors.index.*.json",
    "*.bin",
    "*.bin.index.json",
    "*.bin.index.*.json",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.ckpt.*",
    "*.h5",
    "*.msgpack",
    "*.gguf",
    "*.onnx",
    "*.onnx_data",
    "*.ot",
    "*.tflite",
    "*.distcp",
    "*.npz",
    "*.nemo",
    "*.mlmodel",
    "adapter_config.json",
)
"""Weights in any format, adapters with their configs, and training state: none of them may lie beside converted
weights."""

_WEIGHT_FOLDERS = ("original/*", "onnx/*", "coreml/*", "openvino/*", "metal/*", "global_step*/*")

_VARIANT = re.compile(
    r"(model\.(?P<single>[\w-]+)\.safetensors|pytorch_model\.(?P<bin>[\w-]+)\.bin"
    r"|(model\.safetensors|pytorch_model\.bin)\.index\.(?P<index>[\w-]+)\.json)"
)

_QUANTISED_TENSORS = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|SCB|weight_scale|weight_scale_inv|weight_scale_2|input_scale|weight_packed|absmax"
    r"|quant_map|quant_state\.[\w.]+|weight_format|codebooks)$"
)
_QUANTISED_BYTES = re.compile(r"(weight|_blocks|_scales)$")
_QUANTISED_DTYPES = {
    "F8_E5M2",
    "F8_E4M3",
    "F8_E8M0",
    "F8_E4M3FNUZ",
    "F8_E5M2FNUZ",
    "U8",
    "I8",
    "F4",
    "F6_E2M3",
    "F6_E3M2",
}

_WRAPPERS = (
    (
        re.compile(r"^base_model\.model\.|\.(base_layer|lora_[AB]|lora_embedding_[AB]|modules_to_save)\."),
        "PEFT",
        "merge_and_unload()",
    ),
    (re.compile(r"^module\."), "DistributedDataParallel or DeepSpeed", "its attribute module"),
    (re.compile(r"(^|\.)_orig_mod\."), "torch.compile", "its attribute _orig_mod"),
    (re.compile(r"(^|\.)_fsdp_wrapped_module\."), "FSDP", "accelerate's unwrap_model"),
    (re.compile(r"(^|\.)_checkpoint_wrapped_module\."), "activation checkpointing", "the model before it was wrapped"),
)
"""Pattern of tensor names inside a wrapper, the library that wraps, and how to reach the wrapped model."""

_MERGE_FIRST = "load the model in its own library, save it in bf16, and convert that"


def is_weight_file(name: str) -> bool:
    """Return whether the file at this relative path holds weights or training state, in any format."""
    base = name.rsplit("/", 1)[-1]
    return any(fnmatch(base, pattern) for pattern in _WEIGHT_PATTERNS) or any(
        fnmatch(name, folder) for folder in _WEIGHT_FOLDERS
    )


def choose_weights(files: Iterable[str], where: str) -> str:
    """Return the weight file or index that transformers would load.

    Args:
        files: paths relative to the checkpoint.
        where: the name of the checkpoint in error messages.

    Raises:
        UnsupportedFormatError: only an adapter, a training checkpoint or a foreign format was found.
        SourceNotFoundError: there are no weights at all.
    """
    names = set(files)
    for name in _PREFERENCE:
        if name in names and "adapter_config.json" in names:
            raise UnsupportedFormatError(
                f"{where} holds a model and an adapter (adapter_config.json), and transformers with peft loads the adapter's base model instead: "
                "move adapter_config.json and adapter_model.* to another folder, or merge the adapter first (merge_and_unload)"
            )
        if name in names:
            return name
    if variant := _variant(names):
        raise UnsupportedFormatError(
            f"{where} holds only weights of the variant {variant[1]!r} (found {variant[0]}), which transformers does not load by default: "
            f"load it with from_pretrained(..., variant={variant[1]!r}), save it with save_pretrained without a variant, and name that folder"
        )
    refusals = (
        (
            ("resolved_recipe.yaml",),
            "a run of gqa-convert uptrain: name its subfolder model/, which exists once the run is complete",
        ),
        (
            ("adapter_config.json", "adapter_model.*"),
            "an adapter, not a whole model: merge it into its base model first (merge_and_unload)",
        ),
        (
            ("*.distcp", ".metadata"),
            "a distributed training checkpoint: consolidate it first (torch.distributed.checkpoint.format_utils)",
        ),
        (
            ("global_step*/*", "zero_to_fp32.py"),
            "a DeepSpeed checkpoint: consolidate it first with its zero_to_fp32.py",
        ),
        (("*.gguf",), "a GGUF file: convert the Hugging Face checkpoint that it was made from"),
        (
            ("*.h5", "*.msgpack", "*.ckpt.index"),
            "only weights for TensorFlow or Flax: save the model as safetensors first",
        ),
        (
            ("consolidated*.safetensors", "consolidated*.pth"),
            "weights in the vendor's original layout: use the Hugging Face version",
        ),
    )
    for patterns, text in refusals:
        found = sorted(name for name in names if any(fnmatch(name, pattern) for pattern in patterns))
        if found:
            raise UnsupportedFormatError(f"{where} holds {text} (found {found[0]})")
    raise SourceNotFoundError(
        f"{where} holds no weights (none of {', '.join(_PREFERENCE)}): name the folder that save_pretrained wrote"
    )


def _variant(names: set[str]) -> tuple[str, str] | None:
    """Return a weight file that transformers loads only with `variant=`, and the name of the variant."""
    for name in sorted(names):
        if found := _VARIANT.fullmatch(name):
            return name, found["single"] or found["bin"] or found["index"]
    return None


def refuse_quantised_config(config: Mapping[str, Any], where: str) -> None:
    """Raise UnsupportedFormatError if the config, or a config inside it, describes quantised weights."""
    for key, value in config.items():
        # transformers looks up a quantisation method even if quantization_config is empty
        if (key == "quantization_config" and value is not None) or (key == "compression_config" and value):
            if not value:
                raise UnsupportedFormatError(
                    f"{where} has {key} = {json.dumps(value)}, which transformers cannot load: remove the key if the weights are not quantised"
                )
            method = value.get("quant_method", "unnamed method") if isinstance(value, Mapping) else value
            raise UnsupportedFormatError(f"{where} says that the weights are quantised ({method}): {_MERGE_FIRST}")
        if isinstance(value, Mapping):
            refuse_quantised_config(value, where)


def refuse_quantised_tensor(name: str, dtype: str, where: str) -> None:
    """Raise UnsupportedFormatError if a tensor's name or dtype marks quantised weights."""
    if _QUANTISED_TENSORS.search(name) or (dtype in _QUANTISED_DTYPES and _QUANTISED_BYTES.search(name)):
        raise UnsupportedFormatError(f"{where} holds quantised weights (tensor {name}, type {dtype}): {_MERGE_FIRST}")


def refuse_wrapped_tensor(name: str, where: str) -> None:
    """Raise UnsupportedFormatError if a tensor's name has the prefix of a wrapper, which transformers would not find."""
    for pattern, wrapper, inside in _WRAPPERS:
        if pattern.search(name):
            raise UnsupportedFormatError(
                f"{where} holds a model wrapped by {wrapper} (tensor {name}), whose tensor names transformers does not recognise: save the "
                f"wrapped model ({inside}) with save_pretrained, and convert that"
            )
