"""Quantised weights, which are refused: how a checkpoint shows that it holds them."""

import re
from collections.abc import Mapping

from gqa_convert.checkpoint.headers import bits_per_element
from gqa_convert.checkpoint.strict_json import Config
from gqa_convert.errors import UnsupportedFormatError

_TENSORS = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|SCB|weight_scale|weight_scale_inv|weight_scale_2|input_scale|weight_packed|absmax"
    r"|quant_map|quant_state\.[\w.]+|weight_format|codebooks)$"
)
_BYTES = re.compile(r"(weight|_blocks|_scales)$")

_ORIGINAL = "convert the unquantised checkpoint that it was made from, or one that transformers has dequantised"


def quantisation_method(config: Config) -> str | None:
    """The method by which a config, or a config inside it, says that the weights are quantised; None if none does."""
    mlx = config.get("quantization")
    by_mlx = mlx if isinstance(mlx, Mapping) and "bits" in mlx else None
    for described in (config.get("quantization_config"), config.get("compression_config"), by_mlx):
        if isinstance(described, Mapping):
            return str(described.get("quant_method", "unnamed method"))
        if described is not None:
            return str(described)
    inner = (quantisation_method(value) for value in config.values() if isinstance(value, Mapping))
    return next((method for method in inner if method is not None), None)


def refuse_quantised_config(config: Config, source: str) -> None:
    """Raise UnsupportedFormatError if the config of a checkpoint, or a config inside it, describes quantised weights."""
    method = quantisation_method(config)
    if method is None:
        return
    raise UnsupportedFormatError(f"{source}/config.json says that the weights are quantised ({method}): {_ORIGINAL}")


def refuse_quantised_tensor(name: str, dtype: str, where: str) -> None:
    """Raise UnsupportedFormatError if a tensor's name or dtype marks quantised weights that no config describes."""
    is_byte = dtype != "BOOL" and bits_per_element(dtype) <= 8
    if _TENSORS.search(name) or (is_byte and _BYTES.search(name)):
        raise UnsupportedFormatError(
            f"{where} holds quantised weights (tensor {name}, type {dtype}), which config.json does not describe: {_ORIGINAL}"
        )
