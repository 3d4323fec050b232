"""The config.json of a result: the source's, with the new number of K/V heads."""

import copy

from gqa_convert.families.composite import decoder_config, decoder_section
from gqa_convert.families.family import TESTED, TESTED_KEY, Family, Modeling
from gqa_convert.families.legacy_config_keys import legacy_config_keys
from gqa_convert.runtime.json_objects import JsonObject


def converted_config(
    config: JsonObject, family: Family, modeling: Modeling | None, kv_heads: int
) -> JsonObject:
    """The config of a result whose layers have one number of K/V heads.

    The family's own keys state it, and the keys of ChatGLM2's convention, for old clients and new.

    Args:
        config: the source's.
        family: the source's.
        modeling: the modelling file of the result, if there is one.
        kv_heads: K/V heads of each layer.
    """
    if family.is_composite:
        return _composite_config(config, family, kv_heads)
    result = copy.deepcopy(config)
    # stock classes of types that need a modelling file know no such keys
    if family.modeling is None or modeling is not None:
        for dotted in family.kv_heads_keys:
            *sections, key = dotted.split(".")
            section = result
            for name in sections:
                section[name] = section.get(name) or {}
                section = section[name]
            section[key] = kv_heads
        if family.one_kv_head_key:
            result[family.one_kv_head_key] = kv_heads == 1
    result |= {"multi_query_attention": True, "multi_query_group_num": kv_heads}
    if modeling is None:  # else transformers 5 alone loads it
        return result | legacy_config_keys(result)
    return result | modeling_keys(config, modeling)


def _composite_config(config: JsonObject, family: Family, kv_heads: int) -> JsonObject:
    """The config of a model around a decoder, whose section has the keys. A key of the count that
    stands beside the section too gets the same value there.
    """
    counts = dict.fromkeys(family.kv_heads_keys, kv_heads)
    stated = counts | {"multi_query_attention": True, "multi_query_group_num": kv_heads}
    name = decoder_section(config)
    result = copy.deepcopy(config)
    if name is None:
        result |= stated
        return result | legacy_config_keys(decoder_config(result))
    result[name] |= stated
    result |= {key: kv_heads for key in counts if key in result}
    for key, value in legacy_config_keys(decoder_config(result)).items():
        result[name].setdefault(key, value)
    return result | legacy_config_keys(result)


def modeling_keys(config: JsonObject, modeling: Modeling) -> JsonObject:
    """The config keys that lead transformers to a modelling file and to the source's tokenizer.

    Args:
        config: the source's.
        modeling: the modelling file of the result.
    """
    names = list(modeling.classes.values())
    stated = [f"GQA{name.removeprefix('GQA')}" for name in config.get("architectures") or ()]
    known = [name for name in stated if name in names]
    kept = {
        auto: target
        for auto, target in (config.get("auto_map") or {}).items()
        if not auto.startswith(("AutoConfig", "AutoModel"))
    }
    tokenizer = config.get("tokenizer_class")
    return {
        "model_type": modeling.model_type,
        "architectures": known or [names[min(2, len(names) - 1)]],
        "auto_map": kept | modeling.auto_map,
        "tokenizer_class": modeling.tokenizer if tokenizer is None else tokenizer,
        TESTED_KEY: TESTED,
    }
