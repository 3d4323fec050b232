"""DeciLM (model type `nemotron-nas`): Llama's architecture with a number of K/V heads for each layer.

`block_configs` in config.json has an entry for each layer. It states the query heads of a group, and a factor from
which vLLM, llama.cpp and MLX compute the layer's intermediate size.
"""

import copy
from typing import Any, Final

from gqa_convert.checkpoint.strict_json import Config, JsonObject
from gqa_convert.errors import ConfigError, UnsupportedFamilyError
from gqa_convert.families.windows import has_window

MODEL_TYPE: Final = "nemotron-nas"
_WINDOW_KEYS = ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window")
"""Keys about sliding windows, which a DeciLM does not know. transformers' `generate` would make other masks for
`layer_types`.
"""
_MULTIPLE = 256
"""Engines round an intermediate size up to a multiple of this number."""
_DIGITS = 6
"""Decimal places of a factor that engines keep."""


def ffn_mult(intermediate_size: int, hidden_size: int) -> float | None:
    """The factor from which engines compute an intermediate size; None if no factor yields it."""
    factor = round(1.5 * intermediate_size / hidden_size, _DIGITS)
    return factor if intermediate_size_of(factor, hidden_size) == intermediate_size else None


def intermediate_size_of(factor: float, hidden_size: int) -> int:
    """The intermediate size that engines compute: two thirds of factor * hidden_size, without its decimals, rounded up
    to a multiple of 256.
    """
    return -(-int(2 * factor * hidden_size / 3) // _MULTIPLE) * _MULTIPLE


def why_not(config: Config) -> str | None:
    """Why a config of one of `SOURCES` can't be restated as DeciLM's, a clause that can follow "since"; None if it can."""
    hidden_size, heads, size = (config.get(key) for key in ("hidden_size", "num_attention_heads", "intermediate_size"))
    stated = config.get("architectures")
    if isinstance(stated, list) and stated and not str(stated[0]).endswith("ForCausalLM"):
        return f"it was saved as {stated[0]}, and a DeciLM is a causal language model"
    if type(hidden_size) is not int or type(heads) is not int or type(size) is not int or heads < 1 or hidden_size < 1:
        return "its config lacks hidden_size, num_attention_heads or intermediate_size"
    if hidden_size % heads or config.get("head_dim") not in (None, hidden_size // heads):
        return (
            f"its head_dim is {config.get('head_dim')!r}, and that of a DeciLM is hidden_size / query heads, "
            f"here {hidden_size / heads:g}"
        )
    if config.get("hidden_act", "silu") != "silu":
        return f"its hidden_act is {config['hidden_act']!r}, and engines run a DeciLM with 'silu' only"
    if has_window(config):
        return f"it has a sliding window of {config['sliding_window']} tokens, and a DeciLM has none"
    if ffn_mult(size, hidden_size) is None:
        return (
            f"its intermediate_size is {size}, and engines round that of a DeciLM up to a multiple of {_MULTIPLE}, "
            f"here {-(-size // _MULTIPLE) * _MULTIPLE}"
        )
    return None


def restate(config: Config, counts: tuple[int, ...]) -> JsonObject:
    """A config of one of `SOURCES`, or of a DeciLM, with the K/V heads of each layer stated as a DeciLM states them.

    Model type, architectures and `auto_map` stay.

    Args:
        config: for which `why_not` has no reason.
        counts: K/V heads by layer.
    """
    result = copy.deepcopy({key: value for key, value in config.items() if key not in _WINDOW_KEYS})
    heads = config["num_attention_heads"]
    factor = ffn_mult(config["intermediate_size"], config["hidden_size"])
    result["block_configs"] = [
        {
            "attention": {"n_heads_in_group": heads // count, "no_op": False, "replace_with_linear": False},
            "ffn": {"ffn_mult": factor, "no_op": False, "replace_with_linear": False},
        }
        for count in counts
    ]
    result["num_key_value_heads"] = None
    if config.get("model_type") == "qwen2":  # biases of queries, keys and values alone
        result |= {"attention_bias": False, "qkv_bias": True}
    return result


def kv_heads_by_layer(config: Config, where: str) -> tuple[int, ...]:
    """The K/V heads of each layer of a DeciLM.

    Args:
        config: the content of its config.json.
        where: its path, for messages.

    Raises:
        ConfigError: `block_configs` does not state them.
        UnsupportedFamilyError: a layer has no attention, or a size that differs from the other layers'.
    """
    heads, blocks = config.get("num_attention_heads"), config.get("block_configs")
    if type(heads) is not int or not isinstance(blocks, list) or not blocks:
        raise ConfigError(f"{where} has no block_configs with an entry for each layer: repair the config")
    counts = []
    for number, block in enumerate(blocks):
        attention, ffn = (_section(block, name) for name in ("attention", "ffn"))
        if any(section.get(key) for section in (attention, ffn) for key in ("no_op", "replace_with_linear")):
            raise UnsupportedFamilyError(
                f"layer {number} in {where} leaves out attention or MLP, and so it can't be converted: only layers with "
                "both can"
            )
        size = attention.get("n_heads_in_group")
        if type(size) is not int or size < 1 or heads % size:
            raise ConfigError(
                f"{where} has n_heads_in_group = {size!r} in layer {number}, which does not divide {heads} query heads: "
                "repair the config"
            )
        counts.append(heads // size)
    return tuple(counts)


def _section(block: Any, name: str) -> dict[str, Any]:
    section = block.get(name) if isinstance(block, dict) else None
    return section if isinstance(section, dict) else {}
