"""One frozen record per model type: where its K/V heads live, on disk and in the config. Data only.

Names are those of the files, not of the loaded model; a layer's attention is found by the end of a tensor's name, since prefixes
vary between checkpoints of one family.
"""

from dataclasses import dataclass
from typing import Literal

from gqa_convert.errors import UnsupportedFamilyError

KeyNorm = Literal["none", "shared", "per_head", "per_head_list", "full"]
"""How keys are normalised behind their projection: not at all; with one gain vector [width] for every head; with a gain row per
head [heads, width]; with one tensor per head (`norms.0.weight`, ...); over all heads at once, gain [heads * width]."""

Rotary = Literal["none", "half", "interleaved"]
"""Which rows form a rotary pair: (j, j + rotated/2), or (2j, 2j + 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one `model_type` stores grouped-query attention."""

    model_type: str
    attention: tuple[str, ...] = ("self_attn",)
    """Names of the attention module inside a layer."""
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    output: str = "o_proj"
    fused: str | None = None
    """Name of the one projection that holds [q | k | v], for families that have no separate ones."""
    key_norm: KeyNorm = "none"
    key_norm_name: str = "k_norm"
    rotary: Rotary = "half"
    heads_key: str = "num_attention_heads"
    kv_heads_keys: tuple[str, ...] = ("num_key_value_heads",)
    """Config keys of the K/V-head count, dotted where nested; the first is read, all are written."""
    head_width_key: str | None = "head_dim"
    query_outputs: tuple[int, ...] = (1,)
    """How many times heads * width rows the query projection may have (2 where it also yields a gate)."""
    engines: frozenset[str] = frozenset({"transformers"})
    """Software that loads the family's grouped-query form without custom code."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A model type that is known and not converted, and why."""

    model_type: str
    reason: str


_ALL = frozenset({"transformers", "vLLM", "llama.cpp"})

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(model_type="llama", engines=_ALL),
        Family(model_type="cohere", rotary="interleaved", key_norm="per_head", engines=_ALL),
        Family(model_type="stablelm", key_norm="per_head_list", key_norm_name="k_layernorm.norms", engines=_ALL),
        Family(model_type="olmo2", key_norm="full", engines=_ALL),
        Family(model_type="qwen3", key_norm="shared", engines=_ALL),
        Family(model_type="phi3", fused="qkv_proj", engines=_ALL),
        Family(
            model_type="dbrx", attention=("norm_attn_norm.attn",), fused="Wqkv", output="out_proj", heads_key="n_heads",
            kv_heads_keys=("attn_config.kv_n_heads", "num_key_value_heads"), head_width_key=None, engines=_ALL,
        ),
    )
}  # fmt: skip

REFUSALS: dict[str, Refusal] = {}


def find_family(model_type: object) -> Family:
    """The record of a model type.

    Raises:
        UnsupportedFamilyError: it is unknown, or known not to be convertible.
    """
    if not isinstance(model_type, str) or not model_type:
        raise UnsupportedFamilyError("config.json names no model_type: name the folder that save_pretrained wrote")
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    if model_type in REFUSALS:
        raise UnsupportedFamilyError(f"model type {model_type} can't be converted: {REFUSALS[model_type].reason}")
    raise UnsupportedFamilyError(
        f"model type {model_type!r} is unknown: docs/families.md lists the {len(FAMILIES)} that work and docs/adding-a-family.md "
        "says how to add one"
    )
