"""What the configs of all stock types have in common that a source is rewritten as."""

import copy
from collections.abc import Mapping, Sequence

from gqa_convert.errors import ConfigError
from gqa_convert.runtime.json_objects import Config, JsonObject

_DROPPED = """
_attn_implementation _from_model_config activation_function add_cross_attention architectures
attention_bias attention_dropout attn_implementation attn_pdrop classifier_dropout embd_pdrop
head_dim hidden_act hidden_dropout hidden_size intermediate_size layer_norm_eps layer_norm_epsilon
max_position_embeddings model_type n_ctx n_embd n_head n_inner n_layer n_positions
num_attention_heads num_hidden_layers num_key_value_heads partial_rotary_factor qk_layernorm
reorder_and_upcast_attn resid_pdrop rope_parameters rope_scaling rope_theta rotary_emb_base
rotary_pct scale_attn_by_inverse_layer_idx scale_attn_weights sliding_window summary_activation
summary_first_dropout summary_proj_to_labels summary_type summary_use_proj use_bias
use_parallel_residual
"""
"""Keys that mean nothing, or something else, in a stock type; all that it reads is written anew."""


class NoStockClassError(Exception):
    """No stock class computes the same as a source.

    Args:
        reason: ends the sentence "no stock class computes the same: ".
    """


def refused_value(key: str, value: object) -> NoStockClassError:
    """The error for a config value with which the source computes something that the stock class
    does not.
    """
    return NoStockClassError(
        f"{key} = {value!r}, with which no stock class is known to compute the same"
    )


def read_entries(config: Config, counts: Sequence[str], defaults: JsonObject) -> JsonObject:
    """The values of keys that the stock type has from the source.

    Args:
        config: the source's.
        counts: keys that it must state, with a number above 0.
        defaults: those of the others.

    Raises:
        ConfigError: a count is missing or absurd.
    """
    entries = {key: config.get(key, default) for key, default in defaults.items()}
    for key in counts:
        value = config.get(key)
        if type(value) is not int or value < 1:
            raise ConfigError(
                f"config.json has {key} = {value!r} where a count belongs: repair the config"
            )
        entries[key] = value
    return entries


def stock_config(
    config: Config, stock: str, classes: Mapping[str, str], entries: JsonObject, tokenizer: str
) -> JsonObject:
    """The stock type's config. Keys that belong neither to the source's type nor to the stock
    type's are copied.

    Args:
        config: the source's.
        stock: the stock type.
        classes: its classes by those of the source's type, the first of which stands for none.
        entries: what the stock type reads.
        tokenizer: the tokenizer's class, unless the source states one.

    Raises:
        NoStockClassError: no stock class stands for the source's.
    """
    stated = config.get("architectures") or [next(iter(classes))]
    if not isinstance(stated, list) or len(stated) != 1 or stated[0] not in classes:
        raise NoStockClassError(
            f"architectures = {stated!r}, and {stock} stands for {' or '.join(classes)}"
        )
    dropped = _DROPPED.split()
    kept = {key: value for key, value in config.items() if key not in dropped}
    result = copy.deepcopy(kept)
    result |= {"architectures": [classes[stated[0]]], "model_type": stock} | entries
    result["tokenizer_class"] = config.get("tokenizer_class") or tokenizer
    dtype = config.get("dtype", config.get("torch_dtype"))
    if isinstance(dtype, str):
        result |= {"dtype": dtype, "torch_dtype": dtype}
    return result
