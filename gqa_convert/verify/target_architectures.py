"""The stock types that SOURCE may have been translated to, and what the tensors of both are called. Data, and the
choice of one.

The converter has tables of its own; agreement of the two is part of the proof.
"""

from dataclasses import dataclass
from typing import Any, Literal

from gqa_convert.verify.report import Failure

Layout = Literal["alone", "per head", "quarters", "thirds"]
"""The heads of queries, keys and values: a tensor each; [head][q k v]; four times [q | v | k]; [q | k | v]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Modules of a type, without `.weight` and `.bias`. Those of a layer are below `layers` and its number."""

    prefix: str
    embedding: str
    positions: str | None = None
    layers: str
    norm: str
    second_norm: str | None = None
    """In front of the MLP, where it has one to itself."""
    attention: str
    heads: tuple[str, ...]
    """The projections of queries, keys and values: one, or three."""
    output: str
    up: str
    down: str
    last_norm: str
    logits: tuple[str, ...] = ("lm_head",)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetArchitecture:
    """SOURCE's type and OUT's."""

    source: str
    out: str
    old: Names
    new: Names
    layout: Layout
    interleaved: bool = False
    """SOURCE turns rows (2j, 2j + 1) of a head together; every home (j, j + rotated / 2)."""
    conv: bool = False
    """SOURCE stores weights as [in, out]."""
    folded: bool = False
    """OUT's one norm has neither gain nor bias of its own: those of SOURCE's two are in the projections behind them."""
    biased: bool = True
    """SOURCE's attention has biases, unless its config says otherwise; OUT's always has."""
    logits_bias: bool = False
    """OUT's logits have a bias."""
    buffers: tuple[str, ...]
    """What old versions saved beside an attention's parameters and no class reads."""
    classes: dict[str, str]
    """OUT's class for SOURCE's; the language model first."""
    tokenizer: str
    """SOURCE's tokenizer class where no file names one."""
    special_tokens: tuple[str, ...] = ()
    """Which of its tokens are `<|endoftext|>` by default, and nothing in OUT's class."""


_NEOX = Names(
    prefix="gpt_neox.",
    embedding="embed_in",
    layers="layers",
    norm="input_layernorm",
    second_norm="post_attention_layernorm",
    attention="attention",
    heads=("query_key_value",),
    output="dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    last_norm="final_layer_norm",
    logits=("embed_out", "lm_head"),
)
_GPTJ = Names(
    prefix="transformer.",
    embedding="wte",
    layers="h",
    norm="ln_1",
    attention="attn",
    heads=("q_proj", "k_proj", "v_proj"),
    output="out_proj",
    up="mlp.fc_in",
    down="mlp.fc_out",
    last_norm="ln_f",
)
_CODEGEN = Names(
    prefix="transformer.",
    embedding="wte",
    layers="h",
    norm="ln_1",
    attention="attn",
    heads=("qkv_proj",),
    output="out_proj",
    up="mlp.fc_in",
    down="mlp.fc_out",
    last_norm="ln_f",
)
_GPT2 = Names(
    prefix="transformer.",
    embedding="wte",
    positions="wpe",
    layers="h",
    norm="ln_1",
    second_norm="ln_2",
    attention="attn",
    heads=("c_attn",),
    output="c_proj",
    up="mlp.c_fc",
    down="mlp.c_proj",
    last_norm="ln_f",
)
_PHI = Names(
    prefix="model.",
    embedding="embed_tokens",
    layers="layers",
    norm="input_layernorm",
    attention="self_attn",
    heads=("q_proj", "k_proj", "v_proj"),
    output="dense",
    up="mlp.fc1",
    down="mlp.fc2",
    last_norm="final_layernorm",
)
_STARCODER2 = Names(
    prefix="model.",
    embedding="embed_tokens",
    layers="layers",
    norm="input_layernorm",
    second_norm="post_attention_layernorm",
    attention="self_attn",
    heads=("q_proj", "k_proj", "v_proj"),
    output="o_proj",
    up="mlp.c_fc",
    down="mlp.c_proj",
    last_norm="norm",
)

_NEOX_BUFFERS = ("bias", "masked_bias", "rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
_GPT_BUFFERS = ("bias", "masked_bias", "causal_mask", "embed_positions")

_HOMES = (
    TargetArchitecture(
        source="gpt_neox",
        out="phi",
        old=_NEOX,
        new=_PHI,
        layout="per head",
        folded=True,
        logits_bias=True,
        buffers=_NEOX_BUFFERS,
        classes={"GPTNeoXForCausalLM": "PhiForCausalLM", "GPTNeoXModel": "PhiModel"},
        tokenizer="GPTNeoXTokenizerFast",
    ),
    TargetArchitecture(
        source="gpt_neox",
        out="starcoder2",
        old=_NEOX,
        new=_STARCODER2,
        layout="per head",
        buffers=_NEOX_BUFFERS,
        classes={"GPTNeoXForCausalLM": "Starcoder2ForCausalLM", "GPTNeoXModel": "Starcoder2Model"},
        tokenizer="GPTNeoXTokenizerFast",
    ),
    TargetArchitecture(
        source="gptj",
        out="phi",
        old=_GPTJ,
        new=_PHI,
        layout="alone",
        interleaved=True,
        biased=False,
        logits_bias=True,
        buffers=_GPT_BUFFERS,
        classes={"GPTJForCausalLM": "PhiForCausalLM", "GPTJModel": "PhiModel"},
        tokenizer="GPT2Tokenizer",
    ),
    TargetArchitecture(
        source="codegen",
        out="phi",
        old=_CODEGEN,
        new=_PHI,
        layout="quarters",
        interleaved=True,
        biased=False,
        logits_bias=True,
        buffers=_GPT_BUFFERS,
        classes={"CodeGenForCausalLM": "PhiForCausalLM", "CodeGenModel": "PhiModel"},
        tokenizer="GPT2Tokenizer",
    ),
    TargetArchitecture(
        source="gpt2",
        out="gpt_bigcode",
        old=_GPT2,
        new=_GPT2,
        layout="thirds",
        conv=True,
        buffers=_GPT_BUFFERS,
        classes={"GPT2LMHeadModel": "GPTBigCodeForCausalLM", "GPT2Model": "GPTBigCodeModel"},
        tokenizer="GPT2Tokenizer",
        special_tokens=("bos_token", "eos_token", "unk_token"),
    ),
)


def is_target(source: Any, out: Any) -> bool:
    """Whether some translation leads from one model type to the other."""
    return any((target_architecture.source, target_architecture.out) == (source, out) for target_architecture in _HOMES)


def find_target_architecture(original: dict[str, Any], out: Any) -> TargetArchitecture:
    """The translation of SOURCE to OUT's model type, if that type can compute what SOURCE computes.

    Args:
        original: SOURCE's config.
        out: OUT's model type.
    """
    found = next(
        (
            target_architecture
            for target_architecture in _HOMES
            if (target_architecture.source, target_architecture.out) == (original.get("model_type"), out)
        ),
        None,
    )
    if found is None:
        raise Failure(
            f"OUT claims to be translated and is a {out}, to which nothing translates a {original.get('model_type')}"
        )
    if found.source == "gpt_neox" and (found.out == "phi") != bool(original.get("use_parallel_residual", True)):
        raise Failure(
            f"use_parallel_residual = {original.get('use_parallel_residual', True)} in SOURCE, which {out} does not compute"
        )
    if original.get("add_cross_attention"):
        raise Failure(f"SOURCE has cross-attention, which {out} has not")
    if "auto_map" in original:
        raise Failure(f"SOURCE brings code of its own, which may compute something else than {out}")
    unknown = set(original.get("architectures") or ()) - set(found.classes)
    if unknown:
        raise Failure(f"SOURCE is a {min(unknown)}, of which {out} has no equal")
    return found
