"""How a checkpoint of one model type becomes one of a stock type that computes the same: a record for each type, most of
it in tables, and the stock config that follows from it.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gqa_convert.checkpoint.strict_json import Config, JsonObject
from gqa_convert.errors import ConfigError
from gqa_convert.families.layouts import FusedLayout

FOLDED = "folded"

_DROPPED = """
    _attn_implementation _from_model_config activation_function add_cross_attention apply_residual_connection_post_layernorm
    architectures attention_bias attention_dropout attention_dropout_prob attn_dropout_prob attn_implementation attn_pdrop
    auto_map bf16 bias classifier_dropout dim_model_base emb_dropout_prob embd_pdrop embedding_dropout flash_attn
    flash_rotary fp16 fp32 fused_dense head_dim hidden_act hidden_dropout hidden_dropout_prob hidden_size
    intermediate_size kv_channels layer_norm_eps layer_norm_epsilon max_position_embeddings model_max_length model_type
    n_ctx n_embd n_head n_head_kv n_inner n_layer n_positions no_bias norm_eps norm_epsilon num_attention_heads
    num_experts num_heads num_hidden_layers num_key_value_heads onnx_safe partial_rotary_factor pretraining_tp
    qk_layernorm reorder_and_upcast_attn resid_pdrop residual_dropout rms_norm_eps rope_parameters rope_pct rope_scaling
    rope_theta rotary rotary_dim rotary_emb_base rotary_pct rotary_scaling_factor scale_attn_by_inverse_layer_idx
    scale_attn_weights scale_depth scale_emb seq_length shared_input_output_embedding sliding_window softmax_in_fp32
    sparse_config summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj use_bias
    use_cache_kernel use_cache_quantization use_dynamic_ntk use_flash_attn use_logn_attn use_memorry_efficient_attention
    use_memory_efficient_attention use_parallel_residual use_qkv_bias use_stable_embedding z_loss_weight
"""
"""Keys that mean nothing, or something else, in the stock type; all that it reads is written anew."""


class NoStockClassError(Exception):
    """No stock class computes the same as a source.

    Args:
        reason: ends the sentence "no stock class computes the same: ".
    """


def refused_value(key: str, value: object) -> NoStockClassError:
    """The error for a config value with which the source computes something that the stock class does not."""
    return NoStockClassError(f"{key} = {value!r}, with which no stock class is known to compute the same")


@dataclass(frozen=True, slots=True)
class Module:
    """A module of the stock type, and the one of the source that its tensors come from."""

    stock: str
    own: tuple[str, ...]
    """Names that it may have in the source, of which one is there."""
    has_bias: bool
    """Whether the stock class always has a bias: zeros, where the source has none."""
    roles: tuple[Any, ...] = ()
    """The heads that it holds (query, key, value), if they are cut out of another projection or reordered; with several
    roles, those of each head follow one another."""
    norm: str = ""
    """The norm whose gain and bias it takes over, or `folded` for that norm itself, which becomes 1 and 0."""
    in_layer: bool = False
    """Whether it is in every layer, where both names follow the layer's number."""


def _cells(table: str) -> list[list[str]]:
    return [line.split() for line in table.splitlines() if line.strip()]


def modules(table: str) -> tuple[Module, ...]:
    """The modules in a table: on each line the stock name, with a dot in front of it inside a layer; the source's names,
    joined by `|`; and, where they apply, `bias`, the roles, joined by commas, and the norm behind `norm=`.

    {q,k,v} in a stock name stands for three modules, for the query, the key and the value heads of the source's one. Of
    two lines with one stock name, the later counts, in the place of the earlier.
    """
    found = {}
    for pattern, own, *further in _cells(table):
        norm = ""
        roles: dict[str, tuple[str, ...]] = {pattern: ()}
        for word in further:
            if word.startswith("norm="):
                norm = word.removeprefix("norm=")
            elif word != "bias":
                roles[pattern] = tuple(word.split(","))
        if "{q,k,v}" in pattern:
            roles = {pattern.replace("{q,k,v}", role[0]): (role,) for role in ("query", "key", "value")}
        for stock, held in roles.items():
            name = stock.removeprefix(".")
            found[stock] = Module(name, tuple(own.split("|")), "bias" in further, held, norm, name != stock)
    return tuple(found.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class StockForm:
    """How a checkpoint of one model type becomes one of a stock type."""

    model_type: str
    stock: str
    """The stock model type."""
    condition: str = "any"
    """Which checkpoints of the source's type it takes, as docs/supported-models.md says it, in Markdown."""
    classes: dict[str, str]
    """The source's classes, as config.json names them, each with the stock one; a language model first."""
    config: str
    """The entries of the stock config: on each line the stock key; the source's key, or `-` where there is none; and the
    default of the source's class as JSON, or `count` for a key that must state a count, or `count=KEY` for one that is the
    stock config's count of that key by default.
    """
    only: str = ""
    """Values besides which the stock class computes something else: on each line the source's key; the value, where any
    that is empty stands for null; and the value of the source's class where the config states none, if it is another.
    """
    further: Callable[[Config, JsonObject], JsonObject] = lambda config, stock: {}
    """Further entries, from the source's config and those of the table."""
    tokenizer: str = ""
    """The tokenizer class where the source names none, if that of the stock type is another."""
    modules: tuple[Module, ...] = ()
    """The embedding of tokens first, the output projection last; empty if all names stay."""
    prefix: str = ""
    """What precedes the names in the source, except in a checkpoint of a model without its head."""
    layers: tuple[str, str] = ("model.layers", "model.layers")
    """What precedes a layer's number."""
    fused_layout: FusedLayout | None = None
    """How the heads lie in the source's projections with `roles`; None where each role has one to itself."""
    transposed: bool = False
    """Whether the matrices of the source's layers are stored [in, out]."""
    interleaved: bool = False
    """Whether rotary pairs are rows (2j, 2j + 1) in the source."""
    bias_key: str = ""
    """Key of the stock config that says whether attention has biases, if it may have none."""
    unit_head: str = ""
    """One of the source's classes, which scales the rows of its output projection to length one whenever it is used."""
    same_up_to: str = ""
    """Key of the source's config with the number of tokens beyond which its custom code computes something else."""
    tokenizer_defaults: dict[str, str] = field(default_factory=dict)
    """Values of tokenizer_config.json that the source's tokenizer class has by default, and that of the stock type has
    not."""


def stock_config(form: StockForm, config: Config) -> JsonObject:
    """The stock type's config. Keys that belong neither to the source's type nor to the stock type's are copied.

    Raises:
        NoStockClassError: it describes something that the stock class does not compute.
        ConfigError: a count is missing or absurd.
    """
    stated = config.get("architectures") or [*form.classes][:1]
    if not isinstance(stated, list) or len(stated) != 1 or stated[0] not in form.classes:
        raise NoStockClassError(f"architectures = {stated!r}, and {form.stock} stands for {' or '.join(form.classes)}")
    for key, known, *default in _cells(form.only):
        value = config.get(key, json.loads(default[0] if default else known))
        if (value or None) != (json.loads(known) or None):
            raise refused_value(key, value)
    dropped = set(_DROPPED.split())
    result = {key: copy.deepcopy(value) for key, value in config.items() if key not in dropped}
    result |= {"architectures": [form.classes[stated[0]]], "model_type": form.stock}
    entries = _entries(form, config)
    result |= entries | form.further(config, entries)
    if form.tokenizer:
        result["tokenizer_class"] = config.get("tokenizer_class") or form.tokenizer
    dtype = config.get("dtype", config.get("torch_dtype"))
    if isinstance(dtype, str):
        result |= {"dtype": dtype, "torch_dtype": dtype}
    auto = config.get("auto_map") or {}
    kept = {key: value for key, value in auto.items() if not key.startswith(("AutoConfig", "AutoModel"))}
    if kept:
        result["auto_map"] = kept
    if "rope_theta" in result:
        result |= _rotary(result)
    return result


def _entries(form: StockForm, config: Config) -> JsonObject:
    """The entries of the form's table."""
    found: JsonObject = {}
    for key, own, default in _cells(form.config):
        if not default.startswith("count"):
            found[key] = config.get(own, json.loads(default))
            continue
        value = config.get(own)
        if value is None:
            value = found.get(default.partition("=")[2])
        if type(value) is not int or value < 1:
            raise ConfigError(f"config.json has {own} = {value!r} where a count belongs: repair the config")
        found[key] = value
    return found


def _rotary(stock: JsonObject) -> JsonObject:
    """Rotary positions under the keys of old and of new clients."""
    scaling = stock.get("rope_scaling")
    parameters = {"rope_type": "default"} | (scaling or {}) | {"rope_theta": stock["rope_theta"]}
    if "partial_rotary_factor" in stock:
        parameters["partial_rotary_factor"] = stock["partial_rotary_factor"]
    return {"rope_scaling": scaling, "rope_parameters": parameters}
