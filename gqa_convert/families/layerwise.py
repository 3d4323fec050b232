"""The forms in which a config states a number of K/V heads for each layer, behind one interface.

DeciLM comes first where it is possible, since vLLM and llama.cpp run it. The other form has the
source's own classes with a list under `num_key_value_heads`, for transformers alone.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any

from gqa_convert.errors import ConfigError
from gqa_convert.runtime.json_objects import Config, JsonObject

from . import decilm
from .composite import config_value
from .family import Family, Modeling
from .legacy_config_keys import legacy_config_keys
from .records import DECILM, record_of


def find_form(family: Family, config: Config) -> Modeling | str:
    """The first form that a result can have whose layers differ, or the reason why it can have
    none.

    Args:
        family: of the source.
        config: of the source.

    Returns:
        The form, or a clause that can follow "since".
    """
    if not family.layerwise:
        return f"all layers of a {family.model_type} have one number"
    for form in family.layerwise:
        reason = decilm.why_not(config) if form.model_type == DECILM else None
        if reason is None:
            return form
    return str(reason)


def restate(form: Modeling, config: Config, counts: tuple[int, ...]) -> JsonObject:
    """A config with the K/V heads of each layer stated as a form states them.

    Model type, architectures and `auto_map` stay.

    Args:
        form: that `find_form` returns for the config, or that the config has already.
        config: of a source.
        counts: K/V heads by layer.
    """
    convention = {"multi_query_attention": True, "multi_query_group_num": list(counts)}
    if form.model_type == DECILM:  # engines read the keys of transformers 4
        return decilm.restate(config, counts) | legacy_config_keys(config) | convention
    return copy.deepcopy(dict(config)) | {"num_key_value_heads": list(counts)} | convention


def kv_heads_by_layer(config: Config, where: str) -> tuple[int, ...] | None:
    """The K/V heads that a config states for each layer; None if its model type has one number for
    all.

    Args:
        config: the content of a config.json.
        where: its path, for messages.

    Raises:
        ConfigError: the config does not state them.
        UnsupportedFamilyError: a layer has no attention, or no MLP.
    """
    kind = record_of(config).kv_heads
    if kind not in ("blocks", "listed"):
        return None
    key = "block_configs" if kind == "blocks" else "num_key_value_heads"
    heads: Any = config.get("num_attention_heads")
    try:
        stated = decilm.stated_kv_heads(config, where) if kind == "blocks" else config[key]
        is_valid = len(stated) == config["num_hidden_layers"] and all(
            heads % count == 0 < count for count in stated
        )
    except (KeyError, TypeError, AttributeError, ZeroDivisionError):
        is_valid = False
    if not is_valid:
        raise ConfigError(
            f"{where} has {key} = {config.get(key)!r} where a number of K/V heads for each layer "
            f"belongs that divides {heads!r} query heads: repair the config"
        )
    return tuple(stated)


def is_decilm(config: Config) -> bool:
    """Whether a config is that of a DeciLM, for which engines have code."""
    return config.get("model_type") == DECILM


def heads_text(heads: int | Sequence[int] | None) -> str:
    """The K/V heads of a layer, or the fewest and most of layers that differ: "4", or "1 to 8"."""
    if isinstance(heads, Sequence):
        return " to ".join(map(str, sorted({min(heads), max(heads)})))
    return str(heads)


def is_run(family: Family, config: Config, module: str) -> bool:
    """Whether a module is where transformers looks for layers, and within their number.

    Args:
        family: of the model.
        config: of its decoder.
        module: its name in the checkpoint.
    """
    match = family.layer_of(module)
    if match is None:
        return False
    return int(match[2]) < (stated_layers(config, dict(family.layers)[match[1]]) or math.inf)


def stated_layers(config: Config, keys: Sequence[str]) -> int | None:
    """The number of layers that a config states under the first of some keys that it has; None
    where it has none.
    """
    for key in keys:
        value = config_value(config, key)
        if isinstance(value, list):
            return len(value)
        if isinstance(value, int):
            return value
    return None
