"""The formats of weights: which set of files is read, and which formats are refused, such as
quantised weights.
"""

import re
from collections.abc import Iterable, Mapping

from gqa_convert.errors import SourceNotFoundError, UnsupportedFormatError
from gqa_convert.runtime.json_objects import Config

from .headers import bits_per_element

SAFETENSORS_SINGLE = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
TORCH_SINGLE = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"

PREFERENCE = (SAFETENSORS_SINGLE, SAFETENSORS_INDEX, TORCH_SINGLE, TORCH_INDEX)
"""The order in which transformers looks for weights."""

_WEIGHTS = re.compile(
    r"adapter_config\.json|.*\.ckpt\..*|.*\.(safetensors|bin)\.index(\..*)?\.json"
    r"|.*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|gguf|onnx|onnx_data|ot|tflite|distcp|npz|nemo|mlmodel)"
)
"""The names of weights in any format, adapters with their configs, and training state: none of them
may lie beside converted weights.
"""
_WEIGHT_FOLDERS = re.compile(r"(original|onnx|coreml|openvino|metal|global_step[^/]*)/")

_ADAPTER = "adapter_config.json"

_WRAPPED = re.compile(
    r"^base_model\.model\.|\.(base_layer|lora_[AB]|lora_embedding_[AB]|modules_to_save)\.|^module\."
    r"|(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
"""What the names of tensors inside a wrapper hold."""

_QUANTISED = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|SCB|weight_scale|weight_scale_inv|weight_scale_2|input_scale"
    r"|weight_packed|absmax|quant_map|quant_state\.[\w.]+|weight_format|codebooks)$"
)
_BYTES = re.compile(r"(weight|_blocks|_scales)$")

_ORIGINAL = (
    "convert the unquantised checkpoint that it was made from, "
    "or one that transformers has dequantised"
)


def is_weight_file(name: str) -> bool:
    """Whether the file at this relative path holds weights or training state, in any format."""
    return bool(_WEIGHTS.fullmatch(name.rpartition("/")[2]) or _WEIGHT_FOLDERS.match(name))


def choose_weights(files: Iterable[str], where: str) -> str:
    """Return the weight file or index that transformers would load.

    Args:
        files: paths relative to the checkpoint.
        where: the name of the checkpoint in error messages.

    Raises:
        SourceNotFoundError: there are no weights at all, or they are in subfolders.
        UnsupportedFormatError: there is an adapter. Beside a whole model, transformers with peft
            would load the adapter's base model instead.
    """
    names = sorted(files)
    if _ADAPTER in names:
        raise UnsupportedFormatError(
            f"{where} holds an adapter ({_ADAPTER}): merge it into its base model (peft's "
            "merge_and_unload), save that with its tokenizer, "
            "and convert it; or, to convert a model without it, move adapter_* to another folder"
        )
    for name in PREFERENCE:
        if name in names:
            return name
    split = [name.rpartition("/") for name in names]
    if folders := [folder for folder, _, file in split if file in PREFERENCE]:
        raise SourceNotFoundError(
            f"{where} holds no weights itself: name a subfolder that does, such as {folders[-1]}"
        )
    raise SourceNotFoundError(
        f"{where} holds no weights that transformers loads by default (none of "
        f"{', '.join(PREFERENCE)}): "
        "name the folder that save_pretrained wrote, or finish the download"
    )


def quantisation_method(config: Config) -> str | None:
    """The method by which a config, or a config inside it, says that the weights are quantised;
    None if none does.
    """
    mlx = config.get("quantization")
    by_mlx = mlx if isinstance(mlx, Mapping) and "bits" in mlx else None
    for described in (config.get("quantization_config"), config.get("compression_config"), by_mlx):
        if isinstance(described, Mapping):
            return str(described.get("quant_method", "unnamed method"))
        if described is not None:
            return str(described)
    for value in config.values():
        if isinstance(value, Mapping) and (method := quantisation_method(value)) is not None:
            return method
    return None


def refuse_quantised_config(config: Config, source: str) -> None:
    """Raise UnsupportedFormatError if the config of a checkpoint, or a config inside it, describes
    quantised weights.
    """
    method = quantisation_method(config)
    if method is not None:
        raise UnsupportedFormatError(
            f"{source}/config.json says that the weights are quantised ({method}): {_ORIGINAL}"
        )


def refuse_tensor(name: str, dtype: str, where: str) -> None:
    """Raise UnsupportedFormatError if a tensor's name has the prefix of a wrapper, which
    transformers would not find, or if its name or dtype marks quantised weights that no config
    describes.
    """
    if _WRAPPED.search(name):
        raise UnsupportedFormatError(
            f"{where} holds tensor {name}, which a wrapper has named (PEFT, "
            "DistributedDataParallel, DeepSpeed, torch.compile or FSDP) and transformers "
            "does not find: save the model inside (merge_and_unload, "
            "accelerate's unwrap_model) with save_pretrained, and convert that"
        )
    is_byte = dtype != "BOOL" and bits_per_element(dtype) <= 8
    if _QUANTISED.search(name) or (is_byte and _BYTES.search(name)):
        raise UnsupportedFormatError(
            f"{where} holds quantised weights (tensor {name}, type {dtype}), "
            f"which config.json does not describe: {_ORIGINAL}"
        )
