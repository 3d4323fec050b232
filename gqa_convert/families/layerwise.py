"""The forms in which a config states a number of K/V heads for each layer, behind one interface.

DeciLM comes first where it is possible, since vLLM and llama.cpp run it. The other form has the source's own classes
with a list under `num_key_value_heads`, for transformers alone.
"""

import copy
from collections.abc import Sequence

from gqa_convert.checkpoint.strict_json import Config, JsonObject
from gqa_convert.errors import ConfigError
from gqa_convert.families import decilm
from gqa_convert.families.family import Family, Modeling
from gqa_convert.families.legacy_config_keys import legacy_config_keys
from gqa_convert.families.table import FAMILIES
from gqa_convert.families.wrappers import decoder_config


def find_form(family: Family, config: Config) -> Modeling | str:
    """The first form that a result can have whose layers differ, or the reason why it can have none.

    Args:
        family: of the source.
        config: of the source.

    Returns:
        The form, or a clause that can follow "since".
    """
    reason = f"all layers of a {family.model_type} have one number"
    for form in family.layerwise:
        found = _why_not(form, config)
        if found is None:
            return form
        reason = found
    return reason


def why_not_decilm(form: Modeling, family: Family, config: Config) -> str | None:
    """Why a result does not have the form of a DeciLM, a clause that can follow "since"; None if it has it, or if no
    source of the family can have it.

    Args:
        form: of the result.
        family: of the source.
        config: of the source.
    """
    others = [each for each in family.layerwise if _is_decilm(each)]
    return None if _is_decilm(form) or not others else _why_not(others[0], config)


def _why_not(form: Modeling, config: Config) -> str | None:
    """Why a result of the config can't have a form, in the same words; None if it can."""
    if _is_decilm(form):
        return decilm.why_not(config)
    stated = config.get("architectures")
    names = {name.removeprefix("GQA") for _, name in form.classes}
    if isinstance(stated, list) and stated and str(stated[0]).removeprefix("GQA") not in names:
        return f"it was saved as {stated[0]}, and layers may differ in a causal language model only"
    return None


def restate(form: Modeling, config: Config, counts: tuple[int, ...]) -> JsonObject:
    """A config with the K/V heads of each layer stated as a form states them.

    Model type, architectures and `auto_map` stay.

    Args:
        form: that `find_form` returns for the config, or that the config has already.
        config: of a source.
        counts: K/V heads by layer.
    """
    convention = {"multi_query_attention": True, "multi_query_group_num": list(counts)}
    if _is_decilm(form):  # engines read the keys of transformers 4
        return decilm.restate(config, counts) | legacy_config_keys(config) | convention
    return copy.deepcopy(dict(config)) | {"num_key_value_heads": list(counts)} | convention


def kinds_of_layers(config: Config) -> list[str]:
    """The kind of each layer of a decoder whose class reads `per_layer_config`.

    Args:
        config: of the decoder, with the defaults of its class.
    """
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return [str(kind) for kind in kinds]
    every = config["sliding_window_pattern"]
    numbers = range(1, config["num_hidden_layers"] + 1)
    return ["sliding_attention" if number % every else "full_attention" for number in numbers]


def restate_by_kind(config: Config, counts: Sequence[int]) -> JsonObject:
    """A config of a class that reads `per_layer_config`, with one number of K/V heads for each kind of layer.

    The class reads one set of values for all layers of a kind. Those of layers with full attention stand in
    `per_layer_config`, with their head_dim, which the class takes from there alone once the key exists.

    Args:
        config: of the source.
        counts: K/V heads of the layers that have keys and values, which are the first ones.
    """
    result = copy.deepcopy(dict(config))
    stated = decoder_config(config)
    by_kind = dict(zip(kinds_of_layers(stated), counts, strict=False))
    result["num_key_value_heads"] = by_kind["sliding_attention"]
    entries = result.setdefault("per_layer_config", {})
    for number, kind in enumerate(kinds_of_layers(stated)):
        if kind == "full_attention":
            entry = entries.setdefault(str(number), {"head_dim": config.get("global_head_dim", 512)})
            entry["num_key_value_heads"] = by_kind[kind]
    return result | {"multi_query_attention": True, "multi_query_group_num": list(counts)}


def kv_heads_by_layer(config: Config, where: str) -> tuple[int, ...] | None:
    """The K/V heads that a config states for each layer; None if its model type has one number for all.

    Args:
        config: the content of a config.json.
        where: its path, for messages.

    Raises:
        ConfigError: the config does not state them.
        UnsupportedFamilyError: a layer has no attention, or a size that differs from the other layers'.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or not family.is_layerwise:
        return None
    if family.kv_heads == "blocks":
        return decilm.kv_heads_by_layer(config, where)
    stated, heads, layers = (
        config.get(key) for key in ("num_key_value_heads", "num_attention_heads", "num_hidden_layers")
    )
    if type(heads) is not int or not isinstance(stated, list) or len(stated) != layers:
        raise ConfigError(f"{where} has no num_key_value_heads with a number for each layer: repair the config")
    for number, count in enumerate(stated):
        if type(count) is not int or count < 1 or heads % count:
            raise ConfigError(
                f"{where} has num_key_value_heads = {count!r} in layer {number}, which does not divide {heads} query "
                "heads: repair the config"
            )
    return tuple(stated)


def sources_of(model_type: str) -> frozenset[str]:
    """The model types whose layers compute what those of a result of this type compute; empty if its layers don't differ."""
    return frozenset(
        name for name, family in FAMILIES.items() if any(form.model_type == model_type for form in family.layerwise)
    )


def is_decilm(config: Config) -> bool:
    """Whether a config is that of a DeciLM, for which engines have code."""
    return config.get("model_type") == decilm.MODEL_TYPE


def _is_decilm(form: Modeling) -> bool:
    return form.model_type == decilm.MODEL_TYPE
