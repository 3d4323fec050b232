"""Which dimensions of a key head are rotary, and which two of them form a pair."""

from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.errors import ConfigError
from gqa_convert.families.family import Family, RotaryCount, RotaryShare
from gqa_convert.families.geometry import config_value

Array = npt.NDArray[Any]


def rotary_pairs(family: Family, config: dict[str, Any], head_dim: int) -> tuple[Array, Array]:
    """The rotary pairs of a key head.

    Args:
        family: of the checkpoint.
        config: its config.json.
        head_dim: rows of a key head.

    Returns:
        The rows that are real parts and those that are imaginary parts, in order of frequency; both empty without
        rotary positions.

    Raises:
        ConfigError: the config states a number of rotary dimensions that makes no pairs.
    """
    rotated = _rotated(family, config, head_dim)
    rows = np.arange(rotated)
    if family.rotary == "interleaved":
        return rows[0::2], rows[1::2]
    return rows[: rotated // 2], rows[rotated // 2 :]


def _rotated(family: Family, config: dict[str, Any], head_dim: int) -> int:
    """The number of rotary dimensions."""
    dimensions = family.rotary_dimensions
    if dimensions is None or _switched_off(family, config):
        return 0
    if isinstance(dimensions, RotaryCount):
        rotated = config.get(dimensions.key, dimensions.default) or head_dim
    else:
        rotated = _from_share(dimensions, config, head_dim)
    if type(rotated) is not int or not 0 <= rotated <= head_dim or rotated % 2:
        raise ConfigError(
            f"config.json states {rotated!r} rotary dimensions of {head_dim} in a head, which make no pairs: repair it"
        )
    return rotated


def _from_share(share: RotaryShare, config: dict[str, Any], head_dim: int) -> Any:
    stated = next((value for key in share.keys if (value := config_value(config, key)) is not None), None)
    if stated is None and share.count_key is not None and config.get(share.count_key) is not None:
        return config[share.count_key]
    stated = share.default if stated is None else stated
    if not isinstance(stated, int | float):
        raise ConfigError(f"config.json states {stated!r} as the rotary share of a head, which is no number: repair it")
    return int(head_dim * stated)


def _switched_off(family: Family, config: dict[str, Any]) -> bool:
    """Whether the config does without the rotary positions that its type may have."""
    if family.rotary_only_when is None:
        return False
    key, wanted = family.rotary_only_when
    stated = config.get(key)
    return (bool(stated) if isinstance(wanted, bool) else stated) != wanted
