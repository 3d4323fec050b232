"""The target architectures of translations: which stock model type stands for which, and the tensor names of both.

The converter has separate tables. The agreement of the two is part of the proof.
"""

from dataclasses import dataclass
from typing import Any, Literal

from gqa_convert.verify.report import Failure

Layout = Literal["separate", "per head", "quarters", "thirds"]
"""How SOURCE stores queries, keys and values: in one tensor each, or fused as [head][q k v], as [q | v | k] four times or
as [q | k | v].
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The modules of a model type. Those of a layer are below `layers` and the layer's number."""

    prefix: str
    embedding: str
    positions: str | None = None
    layers: str
    norm: str
    second_norm: str | None = None
    """The norm before the MLP, if the MLP has its own."""
    attention: str
    heads: tuple[str, ...]
    """The projections to queries, keys and values: one fused projection, or three."""
    output: str
    up: str
    down: str
    last_norm: str
    logits: tuple[str, ...] = ("lm_head",)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetArchitecture:
    """A translation from SOURCE's model type to OUT's."""

    source: str
    out: str
    old: Names
    new: Names
    layout: Layout
    interleaved: bool = False
    """SOURCE rotates rows (2j, 2j + 1) of a head together. Every target rotates (j, j + rotated / 2)."""
    conv: bool = False
    """SOURCE stores weights as [in, out]."""
    folded: bool = False
    """OUT has one neutral norm, and the gains and biases of SOURCE's two norms are folded into the projections behind."""
    biased: bool = True
    """SOURCE's attention has biases unless its config says otherwise. OUT's always has them."""
    logits_bias: bool = False
    """OUT's logits have a bias."""
    buffers: tuple[str, ...]
    """Buffers of attention that earlier releases saved and that no class reads."""
    classes: dict[str, str]
    """OUT's class for each class of SOURCE's type; the language model comes first."""
    tokenizer: str
    """The tokenizer class of SOURCE's type, which applies where no file names one."""
    special_tokens: tuple[str, ...] = ()
    """Tokens that are `<|endoftext|>` by default in this class and absent by default in the class of OUT's type."""


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

_TARGETS = (
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
        layout="separate",
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
    """Whether a translation leads from one model type to the other."""
    return any((target.source, target.out) == (source, out) for target in _TARGETS)


def find_target_architecture(original: dict[str, Any], out: Any) -> TargetArchitecture:
    """The translation of SOURCE to OUT's model type.

    Args:
        original: SOURCE's config.
        out: OUT's model type.

    Raises:
        Failure: there is none, or OUT's type cannot compute what SOURCE computes.
    """
    source = original.get("model_type")
    found = next((target for target in _TARGETS if (target.source, target.out) == (source, out)), None)
    if found is None:
        raise Failure(f"OUT claims to be a translation and is a {out}, but no translation leads there from a {source}")
    if found.source == "gpt_neox" and (found.out == "phi") != bool(original.get("use_parallel_residual", True)):
        raise Failure(
            f"SOURCE has use_parallel_residual = {original.get('use_parallel_residual', True)}, which {out} cannot compute"
        )
    if original.get("add_cross_attention"):
        raise Failure(f"SOURCE has cross-attention, which {out} does not have")
    if "auto_map" in original:
        raise Failure(f"SOURCE comes with its own code, which may compute something else than {out}")
    unknown = set(original.get("architectures") or ()) - set(found.classes)
    if unknown:
        raise Failure(f"SOURCE is a {min(unknown)}, and {out} has no equivalent class")
    return found
