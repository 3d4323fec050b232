"""Which rows of a key head have rotary positions, by the config."""

from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.errors import ConfigError
from gqa_convert.runtime.json_objects import Config

from .composite import config_value
from .family import Family

_SHARE_KEYS = ("rope_parameters.partial_rotary_factor", "partial_rotary_factor", "rotary_pct")
"""Config keys of the share of a head that is rotary; the first one that is stated counts."""


def rotary_pairs(family: Family, config: Config, head_dim: int) -> npt.NDArray[Any]:
    """The rotary pairs of a key head.

    Args:
        family: of the checkpoint.
        config: of its decoder.
        head_dim: rows of a key head.

    Returns:
        [2, f]: the rows that are real parts and those that are imaginary parts, in order of
        frequency.

    Raises:
        ConfigError: the config states a number of rotary dimensions that makes no pairs.
    """
    key, wanted = family.rotary_only_when or ("", False)
    if family.rotary == "none" or config.get(key, False) != wanted:
        return np.empty((2, 0), int)
    count = _rotary_dimensions(family, config, head_dim)
    if type(count) is not int or not 0 <= count <= head_dim or count % 2:
        raise ConfigError(
            f"config.json states {count!r} rotary dimensions of {head_dim} in a head, which make "
            "no pairs: repair it"
        )
    rows = np.arange(count)
    return rows.reshape(-1, 2).T if family.rotary == "interleaved" else rows.reshape(2, -1)


def _rotary_dimensions(family: Family, config: Config, head_dim: int) -> Any:
    """What the config states, directly or as a share of the head; it may be no number."""
    for key in _SHARE_KEYS if family.reads_rotary_share else ():
        share = config_value(config, key)
        if share is not None:
            return int(head_dim * share) if isinstance(share, int | float) else share
    count = config.get(family.rotary_count_key)
    return int(head_dim * family.rotary_share) if count is None else count
