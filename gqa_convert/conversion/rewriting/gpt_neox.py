"""GPT-NeoX with parallel blocks as phi, which computes the same with one norm in each block."""

from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.families import layouts
from gqa_convert.runtime.json_objects import Config, JsonObject

from .arrays import head_rows
from .other_form import OtherForm
from .stock_config import NoStockClassError, read_entries, refused_value, stock_config

_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
_DEFAULTS = {
    "initializer_range": 0.02,
    "use_cache": True,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": None,
    "hidden_act": "gelu",
    "attention_dropout": 0.0,
    "max_position_embeddings": 2048,
}
"""Of GPT-NeoX's config, by keys that phi has too."""
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
"""Kinds of rotary scaling that source and stock class compute with the same function of
transformers.
"""


def rewrite_gpt_neox(source: Checkpoint, _: int) -> Checkpoint:
    """A GPT-NeoX as a phi with all its heads, for a conversion to any number of K/V heads.

    Raises:
        NoStockClassError: phi does not compute the same.
        ConfigError: a count is missing; or a tensor is, has another shape than the config says, or
            belongs to no module.
        UnsupportedFormatError: a tensor has a type that can't be read in numbers.
    """
    config = _config(source.config)
    form = OtherForm(source, "gpt_neox.", "embed_in")
    hidden_size, heads = config["hidden_size"], config["num_attention_heads"]
    sections = layouts.fused("grouped", heads, heads, hidden_size // heads)
    form.move("model.embed_tokens", f"{form.prefix}embed_in")
    for number in range(config["num_hidden_layers"]):
        stock, own = f"model.layers.{number}", f"{form.prefix}layers.{number}"
        norm, qkv = f"{own}.input_layernorm", f"{own}.attention.query_key_value"
        # the one norm has neither the gains nor the biases of the source's two
        form.add_folded_norm(f"{stock}.input_layernorm", norm)
        for name, section in zip("qkv", sections, strict=True):
            form.fold(
                f"{stock}.self_attn.{name}_proj",
                qkv,
                norm,
                head_rows((section,)),
                (3 * hidden_size, hidden_size),
            )
        form.move(f"{stock}.self_attn.dense", f"{own}.attention.dense", has_bias=True)
        form.fold(f"{stock}.mlp.fc1", f"{own}.mlp.dense_h_to_4h", f"{own}.post_attention_layernorm")
        form.move(f"{stock}.mlp.fc2", f"{own}.mlp.dense_4h_to_h")
    form.move("model.final_layernorm", f"{form.prefix}final_layer_norm")
    form.add_head("embed_out", "lm_head", is_tied=config["tie_word_embeddings"], has_bias=True)
    return form.checkpoint(config, config["num_hidden_layers"])


def _config(config: Config) -> JsonObject:
    is_parallel = config.get("use_parallel_residual", True)
    if not is_parallel:
        raise refused_value("use_parallel_residual", is_parallel)
    entries = read_entries(config, _COUNTS, _DEFAULTS)
    heads, vocab_size, padding = (
        entries["num_attention_heads"],
        entries["vocab_size"],
        entries["pad_token_id"],
    )
    if (
        isinstance(padding, int) and not -vocab_size <= padding < vocab_size
    ):  # which an embedding refuses
        raise refused_value("pad_token_id", padding)
    dropout = config.get("hidden_dropout", 0.0)
    entries |= {"num_key_value_heads": heads} | _positions(config, entries["hidden_size"] // heads)
    entries |= {
        "layer_norm_eps": config.get("layer_norm_eps", 1e-5),
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "qk_layernorm": False,
    }
    classes = {"GPTNeoXForCausalLM": "PhiForCausalLM", "GPTNeoXModel": "PhiModel"}
    return stock_config(config, "phi", classes, entries, "GPTNeoXTokenizerFast")


def _positions(config: Config, head_dim: int) -> JsonObject:
    """Rotary positions under the keys of old and of new clients."""
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(parameters, dict) or any(
        isinstance(value, dict) for value in parameters.values()
    ):
        raise refused_value("rope_parameters", parameters)
    further = dict(parameters)
    kind = further.pop("type", "default")
    kind = further.pop("rope_type", kind)
    theta = further.pop("rope_theta", config.get("rotary_emb_base", 10000))
    factor = further.pop("partial_rotary_factor", config.get("rotary_pct", 0.25))
    if kind not in _ROPE_TYPES:
        raise refused_value("rope_type", kind)
    if (
        type(theta) not in (int, float)
        or type(factor) not in (int, float)
        or theta <= 0
        or not 0 < factor <= 1
    ):
        raise NoStockClassError(
            f"a rotary base of {theta!r} on a share of {factor!r} of each head makes no sense"
        )
    rotated = int(head_dim * factor)
    if not rotated or rotated % 2:
        raise NoStockClassError(
            f"{rotated} rotary dimensions of {head_dim} in a head make no pairs"
        )
    scaling = None if kind == "default" else {"rope_type": kind} | further
    base = {"rope_theta": theta, "partial_rotary_factor": factor}
    return base | {
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default"} | (scaling or {}) | base,
    }
