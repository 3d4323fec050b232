"""Which rows of a key head turn with the token's position, and which two of them form a pair."""

from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.errors import ConfigError
from gqa_convert.families import Family
from gqa_convert.geometry import config_value

Array = npt.NDArray[Any]

_SHARES: dict[str, float] = {
    "bamba": 0.5, "glm": 0.5, "glm4": 0.5, "glm4_moe": 0.5, "nemotron": 0.5, "persimmon": 0.5, "phi": 0.5, "recurrent_gemma": 0.5,
    "gpt_neox": 0.25, "stablelm": 0.25, "qwen3_next": 0.25,
}  # fmt: skip
"""What part of a head turns where a config that may say otherwise says nothing: transformers' own defaults."""
_KEYS = ("rope_parameters.partial_rotary_factor", "partial_rotary_factor", "rotary_pct")


def turning_pairs(family: Family, config: dict[str, Any], width: int) -> tuple[Array, Array]:
    """The rotary pairs of a key head.

    Args:
        family: of the checkpoint.
        config: its config.json.
        width: of a key head.

    Returns:
        The rows that are real parts and those that are imaginary parts, in order of frequency; both empty without rotary positions.

    Raises:
        ConfigError: the config asks for a share that makes no pairs.
    """
    rotated = _rotated(family, config, width)
    rows = np.arange(rotated)
    if family.rotary == "interleaved":
        return rows[0::2], rows[1::2]
    return rows[: rotated // 2], rows[rotated // 2 :]


def _rotated(family: Family, config: dict[str, Any], width: int) -> int:
    if family.rotary == "none" or config.get("alibi"):
        return 0
    model_type = family.model_type.removeprefix("gqa_")
    if model_type == "chatglm":
        return width // 2
    if model_type in ("gptj", "codegen"):
        rotated = config.get("rotary_dim", 64) or width
    elif type(config.get("rotary_dim")) is int and model_type == "minimax_m2":
        rotated = config["rotary_dim"]
    else:
        stated = next((value for key in _KEYS if (value := config_value(config, key)) is not None), _SHARES.get(model_type, 1.0))
        if not isinstance(stated, int | float):
            raise ConfigError(f"config.json turns a part of {stated!r} of each head, which is no number: repair it")
        rotated = int(width * stated)
    if type(rotated) is not int or not 0 <= rotated <= width or rotated % 2:
        raise ConfigError(f"config.json turns {rotated!r} of the {width} rows of a head, which makes no pairs: repair it")
    return rotated
