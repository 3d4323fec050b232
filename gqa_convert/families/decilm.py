"""DeciLM (model type `nemotron-nas`): Llama's architecture with a number of K/V heads for each
layer.

`block_configs` in config.json has an entry for each layer. It states the query heads of a group,
and a factor from which vLLM, llama.cpp and MLX compute the layer's intermediate size.
"""

import copy

from gqa_convert.errors import UnsupportedFamilyError
from gqa_convert.runtime.json_objects import Config, JsonObject

from .context_length import has_window

_WINDOW_KEYS = ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window")
"""Keys about sliding windows, which a DeciLM does not know. transformers' `generate` would make
other masks for `layer_types`.
"""
_MULTIPLE = 256
"""Engines round an intermediate size up to a multiple of this number."""


def ffn_mult(intermediate_size: int, hidden_size: int) -> float | None:
    """The factor from which engines compute an intermediate size: two thirds of factor *
    hidden_size, without its decimals, rounded up to a multiple of 256. None if no factor of the six
    decimals that they keep yields it.
    """
    factor = round(1.5 * intermediate_size / hidden_size, 6)
    computed = -(-int(2 * factor * hidden_size / 3) // _MULTIPLE) * _MULTIPLE
    return factor if computed == intermediate_size else None


def why_not(config: Config) -> str | None:
    """Why a config of one of `DECILM_SOURCES` can't be restated as DeciLM's, a clause that can
    follow "since"; None if it can.
    """
    hidden_size, heads, size = (
        config.get(key) for key in ("hidden_size", "num_attention_heads", "intermediate_size")
    )
    if not (
        type(hidden_size) is type(heads) is type(size) is int and hidden_size > 0 and heads > 0
    ):
        return "its config lacks hidden_size, num_attention_heads or intermediate_size"
    if hidden_size % heads or config.get("head_dim") not in (None, hidden_size // heads):
        return (
            f"its head_dim is {config.get('head_dim')!r}, and that of a DeciLM is hidden_size / "
            f"query heads, here {hidden_size / heads:g}"
        )
    if config.get("hidden_act", "silu") != "silu":
        return (
            f"its hidden_act is {config['hidden_act']!r}, and engines run a DeciLM with 'silu' only"
        )
    if has_window(config):
        return (
            f"it has a sliding window of {config['sliding_window']} tokens, and a DeciLM has none"
        )
    if ffn_mult(size, hidden_size) is None:
        return (
            f"its intermediate_size is {size}, and engines round that of a DeciLM up to a multiple "
            f"of {_MULTIPLE}, here {-(-size // _MULTIPLE) * _MULTIPLE}"
        )
    return None


def restate(config: Config, counts: tuple[int, ...]) -> JsonObject:
    """A config of one of `DECILM_SOURCES`, or of a DeciLM, with the K/V heads of each layer stated
    as a DeciLM states them.

    Model type, architectures and `auto_map` stay.

    Args:
        config: for which `why_not` has no reason.
        counts: K/V heads by layer.
    """
    result = copy.deepcopy({key: value for key, value in config.items() if key not in _WINDOW_KEYS})
    present = {"no_op": False, "replace_with_linear": False}
    factor = ffn_mult(config["intermediate_size"], config["hidden_size"])
    result["block_configs"] = [
        {
            "attention": {"n_heads_in_group": config["num_attention_heads"] // count, **present},
            "ffn": {"ffn_mult": factor, **present},
        }
        for count in counts
    ]
    result["num_key_value_heads"] = None
    if config.get("model_type") == "qwen2":  # biases of queries, keys and values alone
        result |= {"attention_bias": False, "qkv_bias": True}
    return result


def stated_kv_heads(config: Config, where: str) -> list[int]:
    """The K/V heads of each layer of a DeciLM; 0 where a group does not divide the query heads.

    Args:
        config: the content of its config.json.
        where: its path, for messages.

    Raises:
        UnsupportedFamilyError: a layer has no attention, or no MLP.
        Exception: one of several, where `block_configs` is missing or malformed.
    """
    counts = []
    for number, block in enumerate(config["block_configs"]):
        parts = block["attention"], block["ffn"]
        if any(part.get("no_op") or part.get("replace_with_linear") for part in parts):
            raise UnsupportedFamilyError(
                f"layer {number} in {where} leaves out attention or MLP, and so it can't be "
                "converted: only layers with both can"
            )
        count, rest = divmod(config["num_attention_heads"], parts[0]["n_heads_in_group"])
        counts.append(0 if rest else count)
    return counts
