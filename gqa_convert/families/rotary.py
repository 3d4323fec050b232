"""Which rows of a key head have rotary positions, by the config."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.errors import ConfigError
from gqa_convert.families.family import Family
from gqa_convert.families.geometry import config_value


def rotary_pairs(family: Family, config: Mapping[str, Any], head_dim: int) -> npt.NDArray[Any]:
    """The rotary pairs of a key head.

    Args:
        family: of the checkpoint.
        config: its config.json.
        head_dim: rows of a key head.

    Returns:
        [2, f]: the rows that are real parts and those that are imaginary parts, in order of frequency.

    Raises:
        ConfigError: the config states a number of rotary dimensions that makes no pairs.
    """
    count = _rotary_dimensions(family, config, head_dim)
    if type(count) is not int or not 0 <= count <= head_dim or count % 2:
        raise ConfigError(
            f"config.json states {count!r} rotary dimensions of {head_dim} in a head, which make no pairs: repair it"
        )
    rows = np.arange(count)
    return rows.reshape(-1, 2).T if family.rotary == "interleaved" else rows.reshape(2, -1)


def _rotary_dimensions(family: Family, config: Mapping[str, Any], head_dim: int) -> Any:
    """What the config states, directly or as a share of the head; it may be no number."""
    dimensions = family.rotary_dimensions
    if dimensions is None:
        return 0
    if family.rotary_only_when is not None:
        key, wanted = family.rotary_only_when
        if config.get(key, False) != wanted:
            return 0
    stated = [config_value(config, key) for key in dimensions.keys]
    shares = [share for share in stated if share is not None]
    if not shares and dimensions.count_key and config.get(dimensions.count_key) is not None:
        return config[dimensions.count_key]
    share = shares[0] if shares else dimensions.default
    return int(head_dim * share) if isinstance(share, int | float) else share
