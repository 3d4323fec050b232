"""A checkpoint whose layers differ in their K/V heads: what its config states, read and derived by verify's own rules.

A DeciLM has `block_configs`, with the query heads of a group and a factor from which engines compute the intermediate
size for each layer. Any other such checkpoint has a list under `num_key_value_heads`.
"""

from pathlib import Path
from typing import Any

from gqa_convert.errors import ConfigError
from gqa_convert.families.family import Family, Modeling
from gqa_convert.verify.checkpoint_reader import CONFIG, read_object
from gqa_convert.verify.geometry import config_value
from gqa_convert.verify.report import Failure


def layerwise_form(out: Path, family: Family) -> Modeling | None:
    """The form of layers that differ whose model type OUT's config has; None if a conversion of the family gives it to
    no result whose layers differ. The check on the config reports one that cannot be read.
    """
    try:
        config = read_object(out / CONFIG)
    except (OSError, ValueError):
        return None
    return next((form for form in family.layerwise if form.model_type == config.get("model_type")), None)


def stated_kv_heads(config: dict[str, Any], layer: int) -> int:
    """The K/V heads that SOURCE, whose layers differ, states for a layer.

    Raises:
        ConfigError: it states none that are possible.
    """
    listed = config.get("num_key_value_heads")
    if isinstance(listed, list):
        count, queries = (listed[layer] if layer < len(listed) else None), config.get("num_attention_heads")
        if type(count) is not int or count < 1 or type(queries) is not int or queries % count:
            raise ConfigError(f"SOURCE's {CONFIG} states {count!r} K/V heads in layer {layer}: repair it")
        return count
    blocks, heads = config.get("block_configs"), config.get("num_attention_heads")
    block = blocks[layer] if isinstance(blocks, list) and layer < len(blocks) else None
    size = config_value(block, "attention.n_heads_in_group") if isinstance(block, dict) else None
    if type(size) is not int or size < 1 or type(heads) is not int or heads % size:
        raise ConfigError(f"SOURCE's {CONFIG} states {size!r} query heads per group in layer {layer}: repair it")
    return heads // size


def is_decilm(form: Modeling) -> bool:
    """Whether a form is DeciLM's, the only one with `block_configs`."""
    return form.model_type == "nemotron-nas"


def block_keys(config: dict[str, Any], original: dict[str, Any], groups: list[int]) -> dict[str, Any]:
    """The config entries of a DeciLM that state the sizes of each layer.

    Args:
        config: OUT's config.
        original: SOURCE's config.
        groups: OUT's K/V heads by layer, those of its tensors.

    Raises:
        Failure: a factor in OUT's `block_configs` does not yield SOURCE's intermediate size.
    """
    heads, hidden_size, inner = (original[key] for key in ("num_attention_heads", "hidden_size", "intermediate_size"))
    blocks = config.get("block_configs")
    factors = [
        config_value(block, "ffn.ffn_mult") if isinstance(block, dict) else None
        for block in (blocks if isinstance(blocks, list) else [])
    ]
    if len(factors) != len(groups):
        raise Failure(f"{CONFIG} has {len(factors)} block_configs, expected {len(groups)}")
    for layer, factor in enumerate(factors):
        if not isinstance(factor, float) or _rounded_up(int(factor * hidden_size * 2 / 3)) != inner:
            raise Failure(f"{CONFIG} has ffn_mult = {factor!r} in layer {layer}, which does not yield {inner}")
    present: dict[str, Any] = {"no_op": False, "replace_with_linear": False}
    keys: dict[str, Any] = {
        "block_configs": [
            {"attention": {"n_heads_in_group": heads // count} | present, "ffn": {"ffn_mult": factor} | present}
            for count, factor in zip(groups, factors, strict=True)
        ],
        "num_key_value_heads": None,
    }
    if original.get("model_type") == "qwen2":  # whose output projection has no bias
        keys |= {"attention_bias": False, "qkv_bias": True}
    return keys


def without_windows(config: dict[str, Any]) -> dict[str, Any]:
    """SOURCE's config without keys about sliding windows, which it does not have."""
    keys = {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
    return {key: value for key, value in config.items() if key not in keys}


def _rounded_up(size: int) -> int:
    """To a multiple of 256."""
    return size + -size % 256
