"""GPT-2 as gpt_bigcode, which computes the same and can have one K/V head."""

from typing import Any

from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.families import layouts
from gqa_convert.runtime.json_objects import Config, JsonObject

from .arrays import head_rows
from .other_form import OtherForm
from .stock_config import NoStockClassError, read_entries, refused_value, stock_config

_CLASSES = {"GPT2LMHeadModel": "GPTBigCodeForCausalLM", "GPT2Model": "GPTBigCodeModel"}
_SAME_WITH = {
    "add_cross_attention": False,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}
"""Values of the source's config with which gpt_bigcode computes the same, which are the defaults
too.
"""
_DEFAULTS = {
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "pad_token_id": None,
    "tie_word_embeddings": True,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "n_inner": None,
    "n_positions": 1024,
}
"""Of GPT-2's config, by keys that gpt_bigcode has too."""
_SET = {
    "add_cross_attention": False,
    "multi_query": False,
    "scale_attn_weights": True,
    "attention_softmax_in_fp32": True,
    "scale_attention_softmax_in_fp32": True,
}
"""What every result states."""
_END = "<|endoftext|>"


def rewrite_gpt2(source: Checkpoint, kv_heads: int) -> Checkpoint:
    """A GPT-2 as a gpt_bigcode with all its heads, for a conversion to one K/V head.

    Raises:
        NoStockClassError: gpt_bigcode does not compute the same.
        ConfigError: a count is missing; or a tensor is, has another shape than the config says, or
            belongs to no module.
        UnsupportedFormatError: a tensor has a type that can't be read in numbers.
    """
    if kv_heads != 1:
        raise NoStockClassError(
            "gpt_bigcode, which is GPT-2 otherwise, has either one K/V head or as many as query "
            "heads"
        )
    config = _config(source.config)
    form = OtherForm(source, "transformer.", "wte")
    hidden_size, heads = config["n_embd"], config["n_head"]
    # gpt_bigcode has the three of each head together
    rows = head_rows(layouts.fused("blocks", heads, heads, hidden_size // heads))

    def move(name: str, **options: Any) -> None:
        form.move(f"transformer.{name}", f"{form.prefix}{name}", **options)

    move("wte")
    move("wpe")
    for number in range(config["n_layer"]):
        move(f"h.{number}.ln_1")
        move(f"h.{number}.ln_2")
        move(
            f"h.{number}.attn.c_attn",
            rows=rows,
            stored=(hidden_size, 3 * hidden_size),
            is_transposed=True,
        )
        for name in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            move(f"h.{number}.{name}", is_transposed=True)
    move("ln_f")
    form.add_head("lm_head", is_tied=config["tie_word_embeddings"])
    return form.checkpoint(
        config, config["n_layer"], {"bos_token": _END, "eos_token": _END, "unk_token": _END}
    )


def _config(config: Config) -> JsonObject:
    for key, known in _SAME_WITH.items():
        value = config.get(key, known)
        if bool(value) != known:
            raise refused_value(key, value)
    entries = read_entries(config, ("vocab_size", "n_embd", "n_head", "n_layer"), _DEFAULTS)
    entries |= {"num_key_value_heads": entries["n_head"]} | _SET
    return stock_config(config, "gpt_bigcode", _CLASSES, entries, "GPT2Tokenizer")
