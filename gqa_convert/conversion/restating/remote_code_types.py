"""One record per model type that loads by custom code and computes what a stock type computes. Data only."""

from dataclasses import dataclass
from typing import Literal

from gqa_convert.conversion.restating import configs
from gqa_convert.families.layouts import FusedLayout
from gqa_convert.families.refusals import RESTATED as STOCK_TYPES

Bias = Literal["never", "always", "attention"]
"""Whether a module has a bias: never, always, or where the tensors have one, which `bias_key` of the stock config then
says for all.
"""


@dataclass(frozen=True, slots=True)
class Module:
    """A module of the stock type, by the names that it has there and in the source; of several, one is there."""

    stock: str
    own: tuple[str, ...]
    bias: Bias = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restated:
    """How a type's checkpoint becomes one of the stock type."""

    model_type: str
    classes: tuple[tuple[str, str], ...]
    """The source's class for language modelling, as config.json names it, and the stock one."""
    config: configs.Reader
    layers: tuple[str, str] = ("model.layers", "model.layers")
    """What precedes a layer's number in the source, and in the stock type."""
    outside: tuple[Module, ...] = ()
    """Modules outside the layers. The last is the output projection, which tied embeddings make superfluous."""
    inside: tuple[Module, ...] = ()
    """Modules of a layer."""
    fused: Module | None = None
    """The projection of queries, keys and values in one, if there is such a module; `stock` is the attention module."""
    fused_layout: FusedLayout = "blocks"
    bias_key: str | None = None
    """Key of the stock config that says whether `attention` modules have biases."""
    stale: tuple[str, ...] = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
    """Ends of names of buffers that no class reads."""
    unit_head: tuple[str, int] | None = None
    """A class in the source's code, and the vocabulary size of the models that have it where no code is there to look
    at: the rows of its output projection are scaled to length one whenever it is used."""
    alike_up_to: str | None = None
    """Key of the source's config with the number of tokens beyond which its custom code computes something else."""

    @property
    def stock(self) -> str:
        """The stock model type that computes the same."""
        return STOCK_TYPES[self.model_type]


def _same(names: str, bias: Bias = "never") -> tuple[Module, ...]:
    return tuple(Module(name, (name,), bias) for name in names.split())


_MLP = _same("mlp.gate_proj mlp.up_proj mlp.down_proj")
_NORMS = _same("input_layernorm post_attention_layernorm")
_OUTSIDE = _same("model.embed_tokens model.norm lm_head")
_PROJECTIONS = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj"
_LLAMA = (*_same(_PROJECTIONS), *_MLP, *_NORMS)
_LLAMA_WITH_BIASES = (*_same(_PROJECTIONS, "attention"), *_MLP, *_NORMS)

RESTATED: dict[str, Restated] = {
    record.model_type: record
    for record in (
        Restated(
            model_type="Yi",
            classes=(("YiForCausalLM", "LlamaForCausalLM"),),
            config=configs.from_yi,
            outside=_OUTSIDE,
            inside=(
                *_same(_PROJECTIONS),
                *_MLP,
                Module("input_layernorm", ("ln1", "input_layernorm")),
                Module("post_attention_layernorm", ("ln2", "post_attention_layernorm")),
            ),
        ),
        Restated(
            model_type="open_llama",
            classes=(("OpenLlamaForCausalLM", "LlamaForCausalLM"),),
            config=configs.from_open_llama,
            outside=_OUTSIDE,
            inside=_LLAMA,
        ),
        Restated(
            model_type="internlm",
            classes=(("InternLMForCausalLM", "LlamaForCausalLM"),),
            config=configs.from_internlm,
            outside=_OUTSIDE,
            inside=_LLAMA_WITH_BIASES,
            bias_key="attention_bias",
        ),
        Restated(
            model_type="internlm2",
            classes=(("InternLM2ForCausalLM", "LlamaForCausalLM"),),
            config=configs.from_internlm2,
            outside=(
                Module("model.embed_tokens", ("model.tok_embeddings",)),
                *_same("model.norm"),
                Module("lm_head", ("output",)),
            ),
            inside=(
                Module("self_attn.o_proj", ("attention.wo",), "attention"),
                Module("mlp.gate_proj", ("feed_forward.w1",)),
                Module("mlp.up_proj", ("feed_forward.w3",)),
                Module("mlp.down_proj", ("feed_forward.w2",)),
                Module("input_layernorm", ("attention_norm",)),
                Module("post_attention_layernorm", ("ffn_norm",)),
            ),
            fused=Module("self_attn", ("attention.wqkv",), "attention"),
            fused_layout="grouped",
            bias_key="attention_bias",
        ),
        Restated(
            model_type="baichuan",
            classes=(("BaiChuanForCausalLM", "LlamaForCausalLM"), ("BaichuanForCausalLM", "LlamaForCausalLM")),
            config=configs.from_baichuan,
            outside=_OUTSIDE,
            inside=(*_same("self_attn.o_proj"), *_MLP, *_NORMS),
            fused=Module("self_attn", ("self_attn.W_pack",)),
            unit_head=("NormHead", 125696),
        ),
        Restated(
            model_type="qwen",
            classes=(("QWenLMHeadModel", "Qwen2ForCausalLM"),),
            config=configs.from_qwen,
            layers=("transformer.h", "model.layers"),
            outside=(
                Module("model.embed_tokens", ("transformer.wte",)),
                Module("model.norm", ("transformer.ln_f",)),
                *_same("lm_head"),
            ),
            inside=(
                Module("self_attn.o_proj", ("attn.c_proj",)),
                Module("mlp.gate_proj", ("mlp.w2",)),
                Module("mlp.up_proj", ("mlp.w1",)),
                Module("mlp.down_proj", ("mlp.c_proj",)),
                Module("input_layernorm", ("ln_1",)),
                Module("post_attention_layernorm", ("ln_2",)),
            ),
            fused=Module("self_attn", ("attn.c_attn",), "always"),
            stale=("rotary_emb.inv_freq", "attn.masked_bias"),
            alike_up_to="seq_length",
        ),
        Restated(
            model_type="stablelm_epoch",
            classes=(("StableLMEpochForCausalLM", "StableLmForCausalLM"),),
            config=configs.from_stablelm_epoch,
            outside=(*_same("model.embed_tokens"), *_same("model.norm", "always"), *_same("lm_head")),
            inside=(
                *_same("self_attn.q_proj self_attn.k_proj self_attn.v_proj", "attention"),
                *_same("self_attn.o_proj"),
                *_MLP,
                *_same("input_layernorm post_attention_layernorm", "always"),
            ),
            bias_key="use_qkv_bias",
        ),
        Restated(
            model_type="minicpm",
            classes=(("MiniCPMForCausalLM", "GraniteForCausalLM"),),
            config=configs.from_minicpm,
            outside=_OUTSIDE,
            inside=_LLAMA_WITH_BIASES,
            bias_key="attention_bias",
        ),
        Restated(
            model_type="phi-msft",
            classes=(("PhiForCausalLM", "PhiForCausalLM"),),
            config=configs.from_phi_msft,
            layers=("transformer.h", "model.layers"),
            outside=(
                Module("model.embed_tokens", ("transformer.embd.wte",)),
                Module("model.final_layernorm", ("lm_head.ln",), "always"),
                Module("lm_head", ("lm_head.linear",), "always"),
            ),
            inside=(
                Module("self_attn.dense", ("mixer.out_proj",), "always"),
                *_same("mlp.fc1 mlp.fc2", "always"),
                Module("input_layernorm", ("ln",), "always"),
            ),
            fused=Module("self_attn", ("mixer.Wqkv",), "always"),
            stale=("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "inner_attn.mask"),
        ),
        *(
            Restated(
                model_type=model_type,
                classes=(("RWForCausalLM", "FalconForCausalLM"), ("FalconForCausalLM", "FalconForCausalLM")),
                config=configs.from_refined_web,
            )
            for model_type in ("RefinedWeb", "RefinedWebModel")
        ),
    )
}
