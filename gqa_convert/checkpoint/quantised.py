"""Quantised weights: how a checkpoint shows that it holds them, and how each kind is dequantised."""

import re
from collections.abc import Mapping
from typing import Any, Final

from gqa_convert.checkpoint.headers import bits_per_element
from gqa_convert.checkpoint.strict_json import Config, JsonObject
from gqa_convert.errors import UnsupportedFormatError

RESTORED: Final = frozenset({"fp8", "mxfp4"})
"""Quantisation methods that `gqa-convert convert` dequantises."""

_TENSORS = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|SCB|weight_scale|weight_scale_inv|weight_scale_2|input_scale|weight_packed|absmax"
    r"|quant_map|quant_state\.[\w.]+|weight_format|codebooks)$"
)
_BYTES = re.compile(r"(weight|_blocks|_scales)$")

_ORIGINAL = "convert the unquantised checkpoint that it was made from"


def quantisation_method(config: Mapping[str, Any]) -> str | None:
    """The method by which a config, or a config inside it, says that the weights are quantised; None if none does."""
    described = described_quantisation(config)
    if isinstance(described, Mapping):
        described = described.get("quant_method", "unnamed method")
    return None if described is None else str(described)


def described_quantisation(config: Mapping[str, Any]) -> Any:
    """What a config, or a config inside it, says of the quantisation; None if it says nothing."""
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            return config[key]
    mlx = config.get("quantization")
    if isinstance(mlx, Mapping) and "bits" in mlx:
        return mlx
    inner = (described_quantisation(value) for value in config.values() if isinstance(value, Mapping))
    return next((described for described in inner if described is not None), None)


def without_quantisation(config: Config) -> JsonObject:
    """A config of the dequantised weights: the source's, edited."""
    result: JsonObject = {}
    for key, value in config.items():
        if key in ("dtype", "torch_dtype"):
            result[key] = "bfloat16"
        elif key not in ("quantization_config", "compression_config"):
            result[key] = without_quantisation(value) if isinstance(value, dict) else value
    return result


def refuse_quantised_config(config: Mapping[str, Any], source: str) -> None:
    """Raise UnsupportedFormatError if the config of a checkpoint, or a config inside it, describes quantised weights."""
    method = quantisation_method(config)
    if method is None:
        return
    advice = _ORIGINAL
    if method in RESTORED:
        advice = (
            f"`gqa-convert convert {source} PLAIN --groups N` writes them dequantised in bfloat16, and with the source's own number "
            "of K/V heads it changes nothing else"
        )
    raise UnsupportedFormatError(f"{source}/config.json says that the weights are quantised ({method}): {advice}")


def refuse_quantised_tensor(name: str, dtype: str, where: str) -> None:
    """Raise UnsupportedFormatError if a tensor's name or dtype marks quantised weights that no config describes."""
    is_byte = dtype != "BOOL" and bits_per_element(dtype) <= 8
    if _TENSORS.search(name) or (is_byte and _BYTES.search(name)):
        raise UnsupportedFormatError(
            f"{where} holds quantised weights (tensor {name}, type {dtype}), which config.json does not describe: {_ORIGINAL}"
        )
