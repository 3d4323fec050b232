"""The formats of weight files: which set of files is read, and which formats are refused."""

import re
from collections.abc import Iterable

from gqa_convert.errors import SourceNotFoundError, UnsupportedFormatError

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
"""The names of weights in any format, adapters with their configs, and training state: none of them may lie beside
converted weights.
"""
_WEIGHT_FOLDERS = re.compile(r"(original|onnx|coreml|openvino|metal|global_step[^/]*)/")

_ADAPTER = "adapter_config.json"

_WRAPPED = re.compile(
    r"^base_model\.model\.|\.(base_layer|lora_[AB]|lora_embedding_[AB]|modules_to_save)\.|^module\."
    r"|(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
"""What the names of tensors inside a wrapper hold."""


def is_weight_file(name: str) -> bool:
    """Return whether the file at this relative path holds weights or training state, in any format."""
    return bool(_WEIGHTS.fullmatch(name.rpartition("/")[2]) or _WEIGHT_FOLDERS.match(name))


def choose_weights(files: Iterable[str], where: str) -> str:
    """Return the weight file or index that transformers would load.

    Args:
        files: paths relative to the checkpoint.
        where: the name of the checkpoint in error messages.

    Raises:
        SourceNotFoundError: there are no weights at all, or they are in subfolders.
    """
    names = sorted(files)
    for name in PREFERENCE:
        if name in names:
            return name
    parts = [name.rpartition("/")[0] for name in names if "/" in name and name.rpartition("/")[2] in PREFERENCE]
    if parts:
        raise SourceNotFoundError(f"{where} holds no weights itself: name a subfolder that does, such as {parts[-1]}")
    raise SourceNotFoundError(
        f"{where} holds no weights that transformers loads by default (none of {', '.join(PREFERENCE)}): name the folder that save_pretrained wrote, or finish the download"
    )


def refuse_adapter(files: Iterable[str], where: str) -> None:
    """Raise UnsupportedFormatError if a folder holds an adapter. Beside a whole model, transformers with peft would load
    the adapter's base model instead.
    """
    if _ADAPTER in files:
        raise UnsupportedFormatError(
            f"{where} holds an adapter ({_ADAPTER}): merge it into its base model (peft's merge_and_unload), save that with its tokenizer, "
            "and convert it; or, to convert a model without it, move adapter_* to another folder"
        )


def refuse_wrapped_tensor(name: str, where: str) -> None:
    """Raise UnsupportedFormatError if a tensor's name has the prefix of a wrapper, which transformers would not find."""
    if _WRAPPED.search(name):
        raise UnsupportedFormatError(
            f"{where} holds tensor {name}, which a wrapper has named (PEFT, DistributedDataParallel, DeepSpeed, torch.compile or FSDP) and transformers "
            "does not find: save the model inside (merge_and_unload, accelerate's unwrap_model) with save_pretrained, and convert that"
        )
