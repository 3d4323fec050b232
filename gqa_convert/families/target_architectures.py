"""Stock classes with a K/V-head count that compute the same function as a source that has none. Data only.

A target architecture is exact: with as many K/V heads as the source has, its logits are the source's up to rounding.
`target_choice` says when that holds, and `target_configs` writes the config.
"""

from dataclasses import dataclass
from typing import Final

from gqa_convert.families.engines import run_in
from gqa_convert.families.family import Family
from gqa_convert.families.layouts import FusedLayout
from gqa_convert.families.table import FAMILIES


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names of one model type's tensors in the files, without `.weight` and `.bias`; those of a layer stand behind
    `<layers>.<number>.`.
    """

    prefix: str
    """What precedes the names of the model without its head, except in a checkpoint of only that model."""
    embedding: str
    positions: str | None = None
    layers: str
    attention_norm: str
    mlp_norm: str | None
    """None where one norm serves the attention and the MLP."""
    attention: str
    query: str | None = None
    key: str | None = None
    value: str | None = None
    fused: str | None = None
    output: str
    up: str
    down: str
    final_norm: str
    heads: tuple[str, ...] = ("lm_head",)
    """Names of the output projection; the first is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A source's model type, which has no K/V-head count: what a translation needs besides the family's record."""

    model_type: str
    names: Names
    attention_biases: bool
    """Whether the attention has biases, unless its config says otherwise."""
    head_bias: bool
    """Whether the output projection has a bias."""
    tied: bool
    """Whether the output projection is the embedding where the config does not say."""
    stale: tuple[str, ...]
    """Ends of the names of buffers that old versions saved and that no class reads."""

    @property
    def family(self) -> Family:
        """The record of the source's type: its layout, its rotary pairs and its tokenizer."""
        return FAMILIES[self.model_type]

    @property
    def fused_layout(self) -> FusedLayout | None:
        """How heads lie in the fused projection; None where queries, keys and values are separate tensors."""
        return None if self.family.fused is None else self.family.fused_layout

    @property
    def interleaved(self) -> bool:
        """Whether rotary pairs are rows (2j, 2j + 1); every target architecture has them as (j, j + rotated/2)."""
        return self.family.rotary == "interleaved"

    @property
    def tokenizer(self) -> str:
        """The tokenizer class that transformers chooses where neither tokenizer_config.json nor config.json names
        one.
        """
        assert self.family.modeling is not None
        return self.family.modeling.tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetArchitecture:
    """A stock model type that computes the same function as `source_type` and has a K/V-head count."""

    source_type: str
    model_type: str
    condition: str
    """Which checkpoints of the source's type it takes, as docs/families.md says it, in Markdown."""
    names: Names
    head_bias: bool
    folds_norms: bool
    """Whether its one norm replaces two of the source's, whose gains and biases are folded into the projections behind
    them."""
    architectures: tuple[tuple[str, str], ...]
    """The source's classes, each with the target's; the language model first."""
    kv_heads_key: str
    special_tokens: tuple[tuple[str, str], ...] = ()
    """Keys that tokenizer_config.json needs where it lacks them, because the source's tokenizer class has them by
    default and the target's does not."""


@dataclass(frozen=True, slots=True)
class NoTargetArchitecture:
    """No stock class computes the same function."""

    reason: str
    """Ends the sentence "no stock class computes the same: "."""


_GPT_NEOX = Names(
    prefix="gpt_neox.",
    embedding="embed_in",
    layers="layers",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    attention="attention",
    fused="query_key_value",
    output="dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    final_norm="final_layer_norm",
    heads=("embed_out", "lm_head"),
)
_GPTJ = Names(
    prefix="transformer.",
    embedding="wte",
    layers="h",
    attention_norm="ln_1",
    mlp_norm=None,
    attention="attn",
    query="q_proj",
    key="k_proj",
    value="v_proj",
    output="out_proj",
    up="mlp.fc_in",
    down="mlp.fc_out",
    final_norm="ln_f",
)
_CODEGEN = Names(
    prefix="transformer.",
    embedding="wte",
    layers="h",
    attention_norm="ln_1",
    mlp_norm=None,
    attention="attn",
    fused="qkv_proj",
    output="out_proj",
    up="mlp.fc_in",
    down="mlp.fc_out",
    final_norm="ln_f",
)
_GPT2 = Names(
    prefix="transformer.",
    embedding="wte",
    positions="wpe",
    layers="h",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    attention="attn",
    fused="c_attn",
    output="c_proj",
    up="mlp.c_fc",
    down="mlp.c_proj",
    final_norm="ln_f",
)
_PHI = Names(
    prefix="model.",
    embedding="embed_tokens",
    layers="layers",
    attention_norm="input_layernorm",
    mlp_norm=None,
    attention="self_attn",
    query="q_proj",
    key="k_proj",
    value="v_proj",
    output="dense",
    up="mlp.fc1",
    down="mlp.fc2",
    final_norm="final_layernorm",
)
_STARCODER2 = Names(
    prefix="model.",
    embedding="embed_tokens",
    layers="layers",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    attention="self_attn",
    query="q_proj",
    key="k_proj",
    value="v_proj",
    output="o_proj",
    up="mlp.c_fc",
    down="mlp.c_proj",
    final_norm="norm",
)

_STALE = (".attn.bias", ".attn.masked_bias", ".attn.causal_mask", ".attn.embed_positions")

ORIGINS: Final[dict[str, Origin]] = {
    "gpt_neox": Origin(
        model_type="gpt_neox",
        names=_GPT_NEOX,
        attention_biases=True,
        head_bias=False,
        tied=False,
        stale=(
            ".attention.bias",
            ".attention.masked_bias",
            "rotary_emb.inv_freq",
            "rotary_emb.cos_cached",
            "rotary_emb.sin_cached",
        ),
    ),
    "gptj": Origin(
        model_type="gptj",
        names=_GPTJ,
        attention_biases=False,
        head_bias=True,
        tied=False,
        stale=_STALE,
    ),
    "codegen": Origin(
        model_type="codegen",
        names=_CODEGEN,
        attention_biases=False,
        head_bias=True,
        tied=False,
        stale=_STALE,
    ),
    "gpt2": Origin(
        model_type="gpt2",
        names=_GPT2,
        attention_biases=True,
        head_bias=False,
        tied=True,
        stale=_STALE,
    ),
}

PHI_FROM_GPT_NEOX: Final = TargetArchitecture(
    source_type="gpt_neox",
    model_type="phi",
    condition="`use_parallel_residual` (Pythia, GPT-NeoX-20B)",
    names=_PHI,
    head_bias=True,
    folds_norms=True,
    kv_heads_key="num_key_value_heads",
    architectures=(("GPTNeoXForCausalLM", "PhiForCausalLM"), ("GPTNeoXModel", "PhiModel")),
)
STARCODER2_FROM_GPT_NEOX: Final = TargetArchitecture(
    source_type="gpt_neox",
    model_type="starcoder2",
    condition="not `use_parallel_residual`, and rotary positions on whole heads (RedPajama-INCITE)",
    names=_STARCODER2,
    head_bias=False,
    folds_norms=False,
    kv_heads_key="num_key_value_heads",
    architectures=(("GPTNeoXForCausalLM", "Starcoder2ForCausalLM"), ("GPTNeoXModel", "Starcoder2Model")),
)
PHI_FROM_GPTJ: Final = TargetArchitecture(
    source_type="gptj",
    model_type="phi",
    condition="any",
    names=_PHI,
    head_bias=True,
    folds_norms=False,
    kv_heads_key="num_key_value_heads",
    architectures=(("GPTJForCausalLM", "PhiForCausalLM"), ("GPTJModel", "PhiModel")),
)
PHI_FROM_CODEGEN: Final = TargetArchitecture(
    source_type="codegen",
    model_type="phi",
    condition="any",
    names=_PHI,
    head_bias=True,
    folds_norms=False,
    kv_heads_key="num_key_value_heads",
    architectures=(("CodeGenForCausalLM", "PhiForCausalLM"), ("CodeGenModel", "PhiModel")),
)
GPT_BIGCODE_FROM_GPT2: Final = TargetArchitecture(
    source_type="gpt2",
    model_type="gpt_bigcode",
    condition="one K/V head, no cross-attention",
    names=_GPT2,
    head_bias=False,
    folds_norms=False,
    kv_heads_key="num_key_value_heads",
    architectures=(("GPT2LMHeadModel", "GPTBigCodeForCausalLM"), ("GPT2Model", "GPTBigCodeModel")),
    special_tokens=tuple((f"{name}_token", "<|endoftext|>") for name in ("bos", "eos", "unk")),
)

TARGETS: Final = (
    PHI_FROM_GPT_NEOX,
    STARCODER2_FROM_GPT_NEOX,
    PHI_FROM_GPTJ,
    PHI_FROM_CODEGEN,
    GPT_BIGCODE_FROM_GPT2,
)


def engines_of(target_architecture: TargetArchitecture) -> frozenset[str]:
    """Software that loads the target's grouped-query form without custom code."""
    return frozenset({"transformers"}) | run_in(target_architecture.model_type)
