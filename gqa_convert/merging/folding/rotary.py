"""Which rows of a key head turn with the token's position, and which two of them form a pair."""

from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.errors import ConfigError
from gqa_convert.families.geometry import config_value
from gqa_convert.families.table import Family

Array = npt.NDArray[Any]

_SHARES: dict[str, float] = {
    "bamba": 0.5,
    "glm": 0.5,
    "glm4": 0.5,
    "glm4_moe": 0.5,
    "nemotron": 0.5,
    "persimmon": 0.5,
    "phi": 0.5,
    "recurrent_gemma": 0.5,
    "gpt_neox": 0.25,
    "qwen3_5_moe_text": 0.25,
    "qwen3_5_text": 0.25,
    "qwen3_next": 0.25,
    "stablelm": 0.25,
    "lfm3": 1.0,
    "mellum": 1.0,
    "minimax_m2": 1.0,
    "phi3": 1.0,
    "phi4_multimodal": 1.0,
    "qwen4_exp_text": 1.0,
    "solar_open": 1.0,
}
"""Types whose config may say what part of a head turns, and the part where it says nothing: transformers' own
defaults.
"""
_KEYS = ("rope_parameters.partial_rotary_factor", "partial_rotary_factor", "rotary_pct")


def rotary_pairs(family: Family, config: dict[str, Any], width: int) -> tuple[Array, Array]:
    """The rotary pairs of a key head.

    Args:
        family: of the checkpoint.
        config: its config.json.
        width: of a key head.

    Returns:
        The rows that are real parts and those that are imaginary parts, in order of frequency; both empty without
        rotary positions.

    Raises:
        ConfigError: the config asks for a share that makes no pairs.
    """
    rotated = _rotated(family, config, width)
    rows = np.arange(rotated)
    if family.rotary == "interleaved":
        return rows[0::2], rows[1::2]
    return rows[: rotated // 2], rows[rotated // 2 :]


def _rotated(family: Family, config: dict[str, Any], width: int) -> int:
    model_type = family.model_type.removeprefix("gqa_")
    if family.rotary == "none" or _switched_off(model_type, config):
        return 0
    if model_type == "chatglm":
        return width // 2
    if model_type in ("gptj", "codegen"):
        rotated = config.get("rotary_dim", 64) or width
    else:
        rotated = _share(model_type, config, width)
    if type(rotated) is not int or not 0 <= rotated <= width or rotated % 2:
        raise ConfigError(
            f"config.json turns {rotated!r} of the {width} rows of a head, which makes no pairs: repair it"
        )
    return rotated


def _share(model_type: str, config: dict[str, Any], width: int) -> Any:
    if model_type not in _SHARES:
        return width  # the class takes no notice of what a config may say
    stated = next((value for key in _KEYS if (value := config_value(config, key)) is not None), None)
    if stated is None and model_type == "minimax_m2" and config.get("rotary_dim") is not None:
        return config["rotary_dim"]
    stated = _SHARES[model_type] if stated is None else stated
    if not isinstance(stated, int | float):
        raise ConfigError(f"config.json turns a part of {stated!r} of each head, which is no number: repair it")
    return int(width * stated)


def _switched_off(model_type: str, config: dict[str, Any]) -> bool:
    """Whether the config does without rotary positions that its type may have."""
    if model_type == "falcon":
        return bool(config.get("alibi"))
    if model_type == "zamba2":
        return not config.get("use_mem_rope")
    return model_type == "granitemoehybrid" and config.get("position_embedding_type") != "rope"
