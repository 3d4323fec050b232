"""One frozen record per model type: where its K/V heads live, on disk and in the config. Data only.

Names are those of the files, not of the loaded model; a layer's attention is found by the end of a tensor's name, since
prefixes vary between checkpoints of one family.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from gqa_convert.errors import UnsupportedFamilyError
from gqa_convert.families.engines import run_in
from gqa_convert.families.layouts import FusedLayout

KeyNorm = Literal["none", "shared", "per_head", "per_head_list", "full"]
"""How keys are normalised behind their projection, always or where the config says so: not at all; each head by itself,
with one gain vector [width] for every head or with no gain; with a gain row per head [heads, width]; with one tensor
per head (`norms.0.weight`, ...); all heads at once, gain [heads * width]."""

Rotary = Literal["none", "half", "interleaved"]
"""Which rows form a rotary pair: (j, j + rotated/2), or (2j, 2j + 1)."""


_GATED = "a gate scales every channel of its attention's output"
_SLOPED = (("decoder", "each head has its own slope of ALiBi, by its number"),)

_CARRIED = "its recurrences or convolutions carry text from one document into the next"
_PADDING_ONLY = "transformers computes its ALiBi from a mask of padding and accepts no other mask"
_NO_POSITIONS = "its decoder accepts no position ids, so that a document can't begin at position 0"

DocumentMask = Literal["positions", "mask", "masks_by_kind"]
"""What makes transformers' class keep packed documents apart: position ids that begin anew with each document, from
which it builds its own masks; a prepared 4-D mask; or a prepared 4-D mask for each kind of layer. Position ids are
passed in every case."""

_GROUPED_MPT = tuple(
    (
        "attn_config.attn_type",
        (kind,),
        f"its attention has {heads} already, which only llm-foundry's own code loads; transformers' Mpt has as many K/V heads as query heads",
    )
    for kind, heads in (
        ("grouped_query_attention", "grouped K/V heads (attn_config.kv_n_heads)"),
        ("multiquery_attention", "one K/V head"),
    )
)

KVHeads = Literal["stated", "heads", "falcon"]
"""What tells a source's number of K/V heads: the config key; nothing, it is the number of query heads; Falcon's three
keys.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Modeling:
    """A modelling file of this package, for families whose attention has no K/V-head count in transformers."""

    file: str
    """Its name in `gqa_convert/families/modeling/` and, with `.py`, in the checkpoints that it is copied into."""
    model_type: str
    """Of the result: stock classes must not take it for theirs."""
    classes: tuple[tuple[str, str], ...]
    """transformers' auto classes, `AutoConfig` first, and the file's class for each."""
    tokenizer: str
    """The tokenizer's class where no file of the checkpoint names one, and transformers would go by the stock model
    type.
    """

    @property
    def auto_map(self) -> dict[str, str]:
        """The entry of config.json that leads transformers to the file."""
        return {auto: f"{self.file}.{name}" for auto, name in self.classes}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one `model_type` stores attention, and what holds it with fewer K/V heads."""

    model_type: str
    layers: tuple[tuple[str, tuple[str, ...]], ...] = (("layers", ("num_hidden_layers",)),)
    """Where a model without a head keeps its layers, and the config keys of their number, or of a list with an entry
    for each; the first one stated counts."""
    prefixes: tuple[str, ...] = ("", "model.", "model.model.", "transformer.")
    """What transformers accepts in front of that: what a model with a head calls the model without one (`transformer`
    where it answers questions), or nothing, or the same once more."""
    without_attention: tuple[str, ...] = ()
    """Parts of tensors' names by which a layer that has something else in the place of attention is known."""
    shared_layers_key: str | None = None
    """Config key of how many of the last layers use the keys and values of layers before them."""
    hidden_key: str = "hidden_size"
    """Config key of the width of the residual stream."""
    attention_input_key: str | None = None
    """Config key of the width that queries, keys and values are computed from, where that is another."""
    attention: tuple[str, ...] = ("self_attn",)
    """Names of the attention module inside a layer."""
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    output: str = "o_proj"
    fused: str | None = None
    """Name of the one projection that holds queries, keys and values, for families that have no separate ones."""
    fused_layout: FusedLayout = "blocks"
    """Order of its rows in the source; the result's is `blocks` wherever K/V heads change in number."""
    cross_attention: tuple[str, ...] = ()
    """Those of `attention` that attend to an encoder's output; a fused projection holds keys and values only there."""
    encoder: str | None = None
    """Name of the module whose attention is an encoder's: converted only when asked for."""
    transposed: bool = False
    """Weights are stored [in, out], as Conv1D has them."""
    key_norm: KeyNorm = "none"
    key_norm_name: str = "k_norm"
    rotary: Rotary = "half"
    key_constraint: str | None = None
    """What stands between keys and queries so that neither can take a factor of the other, beside norms with gains and
    whatever the config says; None if nothing does. A clause that can follow "since"."""
    value_constraint: str | None = None
    """The same for values and the output projection."""
    order_constraints: tuple[tuple[str, str], ...] = ()
    """Places of attention (decoder, cross or encoder) where something outside the module knows its heads by their
    numbers, with what
    does: a clause that can follow "since"."""
    order_constrained_when: tuple[tuple[str, str], ...] = ()
    """Config keys that, when set, make it so everywhere."""
    heads_key: str = "num_attention_heads"
    encoder_heads_key: str | None = None
    kv_heads: KVHeads = "stated"
    kv_heads_keys: tuple[str, ...] = ("num_key_value_heads",)
    """Config keys of the K/V-head count, dotted where nested; the first is read, all are written."""
    encoder_kv_heads_key: str = "encoder_num_key_value_heads"
    head_dim_key: str | None = "head_dim"
    decoder_starts_with_last: bool = False
    """Whether the decoder's input begins with its target's last token, a mark of the language perhaps, whatever the
    config says.
    """
    query_outputs: int = 1
    """How many times heads * width rows the query projection has (2 where it also yields a gate)."""
    refused_when: tuple[tuple[str, str], ...] = ()
    """Config keys that, when set, make a checkpoint of the family unconvertible, each with the reason."""
    refused_unless: tuple[tuple[str, str], ...] = ()
    """The same for keys that must be set."""
    document_mask: DocumentMask = "positions"
    document_barrier: str | None = None
    """Why documents packed into one row can't be kept apart, unless every layer is attention (`layer_types`); None if
    they can. A clause that can follow "since"."""
    document_barred_when: tuple[tuple[str, str], ...] = ()
    """Config keys that, when set, are such a reason."""
    refused_values: tuple[tuple[str, tuple[Any, ...], str], ...] = ()
    """Config keys with the values that make a checkpoint unconvertible, each with the reason."""
    engines: frozenset[str] = frozenset({"transformers"})
    """Software that was seen to load the family's grouped-query form without custom code."""
    modeling: Modeling | None = None
    """The modelling file that the result needs; None where stock classes hold fewer K/V heads."""

    @property
    def native(self) -> bool:
        """Whether transformers' own classes hold fewer K/V heads than query heads."""
        return "transformers" in self.engines


@dataclass(frozen=True, slots=True)
class Refusal:
    """A model type that is known and not converted, and why."""

    model_type: str
    reason: str


def _families(model_types: str, **fields: Any) -> Iterator[Family]:
    """A record for each of several model types that store attention alike."""
    for model_type in model_types.split():
        yield Family(model_type=model_type, engines=frozenset({"transformers"}) | run_in(model_type), **fields)


def _placed(layers: str, keys: str, base: str) -> dict[str, Any]:
    """Where layers are in a family that has one kind of them, whose models with a head call the one without `base`."""
    return {"layers": ((layers, tuple(keys.split())),), "prefixes": ("", f"{base}.", f"{base}.{base}.")}


_T5: dict[str, Any] = {
    "layers": (("decoder.block", ("num_decoder_layers", "num_layers")), ("encoder.block", ("num_layers",))),
    "prefixes": ("", "transformer.", "switch_transformers."),
    "hidden_key": "d_model",
    "order_constraints": tuple(
        (place, "each head has its own position bias, by its number") for place in ("decoder", "encoder")
    ),
    "attention": ("SelfAttention", "EncDecAttention"),
    "cross_attention": ("EncDecAttention",),
    "encoder": "encoder",
    "query": "q",
    "key": "k",
    "value": "v",
    "output": "o",
    "rotary": "none",
    "heads_key": "num_heads",
    "encoder_heads_key": "num_heads",
    "head_dim_key": "d_kv",
}
_BART: dict[str, Any] = {
    "layers": (("decoder.layers", ("decoder_layers",)), ("encoder.layers", ("encoder_layers",))),
    "prefixes": ("", "model.", "model.model."),
    "hidden_key": "d_model",
    "attention": ("self_attn", "encoder_attn"),
    "cross_attention": ("encoder_attn",),
    "encoder": "encoder",
    "output": "out_proj",
    "rotary": "none",
    "heads_key": "decoder_attention_heads",
    "encoder_heads_key": "encoder_attention_heads",
    "head_dim_key": None,
    "document_barrier": _NO_POSITIONS,
}
_PER_HEAD: dict[str, Any] = {
    "fused": "query_key_value",
    "fused_layout": "grouped",
    "output": "dense",
    "head_dim_key": None,
}

_TASKS = {
    "Model": "AutoModel",
    "EncoderModel": "AutoModelForTextEncoding",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
    "MTModel": "AutoModelForSeq2SeqLM",
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
}
_SPEECH_TASKS = _TASKS | {
    "ForConditionalGeneration": "AutoModelForSpeechSeq2Seq",
    "ForAudioClassification": "AutoModelForAudioClassification",
}


_TOKENIZERS = {
    model_type: tokenizer
    for tokenizer, model_types in {
        "T5Tokenizer": "t5 mt5 switch_transformers",
        "GPT2Tokenizer": "gpt2 gpt_neo gptj codegen opt",
        "GPTNeoXTokenizerFast": "gpt_neox mpt",
        "TokenizersBackend": "bloom falcon longt5 persimmon umt5",
        "BartTokenizer": "bart",
        "MBartTokenizer": "mbart",
        "PLBartTokenizer": "plbart",
        "PegasusTokenizer": "pegasus",
        "MarianTokenizer": "marian",
        "M2M100Tokenizer": "m2m_100",
        "BlenderbotTokenizer": "blenderbot",
        "BlenderbotSmallTokenizer": "blenderbot-small",
        "WhisperTokenizer": "whisper",
        "BioGptTokenizer": "biogpt",
    }.items()
    for model_type in model_types.split()
}


def _own_file(
    file: str, names: dict[str, str], tasks: str, *, autos: dict[str, str] = _TASKS, **fields: Any
) -> Iterator[Family]:
    """Records of families that one modelling file serves: as transformers has them, and as they are once converted.

    Args:
        file: of the package's `modeling` folder.
        names: model type -> what the names of its classes in transformers begin with.
        tasks: what they end in, the one for language modelling first behind `Model`.
        autos: the auto class of each task.
        fields: of every record.
    """
    for model_type, name in names.items():
        converted = f"gqa_{model_type.replace('-', '_')}"
        classes = (("AutoConfig", f"GQA{name}Config"), *((autos[task], f"GQA{name}{task}") for task in tasks.split()))
        modeling = Modeling(file=file, model_type=converted, classes=classes, tokenizer=_TOKENIZERS[model_type])
        record = Family(
            model_type=model_type, modeling=modeling, engines=frozenset(), **{"kv_heads": "heads", **fields}
        )
        yield record
        yield replace(record, model_type=converted, kv_heads="stated", fused_layout="blocks")


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        *_families(
            "arcee aria_text cohere_compass_text cwm gemma gemma2 granite granite_swa "
            "granitemoe granitemoe_swa granitemoeshared hyperclovax internlm3 iquestcoder jais2 llama "
            "ministral ministral3 mistral mixtral nemotron olmo phimoe qwen2 qwen2_moe seed_oss smollm3 solar_open "
            "starcoder2 vaultgemma"
        ),
        *_families("bamba", document_barrier=_CARRIED, without_attention=("mamba",)),
        *_families("falcon_h1", document_barrier=_CARRIED),
        *_families("minimax", document_barrier=_CARRIED, without_attention=("self_attn.qkv_proj",)),
        *_families(
            "granitemoehybrid", document_barrier=_CARRIED, document_mask="masks_by_kind", without_attention=("mamba",)
        ),
        *_families("gpt_oss", document_mask="masks_by_kind"),
        *_families("cohere2 cohere2_moe ernie4_5 ernie4_5_moe glm glm4 helium", rotary="interleaved"),
        *_families(
            "llama4_text", rotary="interleaved", prefixes=("", "model.", "language_model.model.", "transformer.")
        ),
        *_families("bitnet", value_constraint="a norm stands between its attention's output and the output projection"),
        *_families("jamba", rotary="none", document_barrier=_CARRIED, without_attention=("mamba",)),
        *_families(
            "nemotron_h",
            rotary="none",
            layers=(("layers", ("num_hidden_layers", "layers_block_type")),),
            attention=("mixer",),
            without_attention=("mixer",),
            document_barrier=_CARRIED,
            prefixes=("", "backbone.", "model.", "model.model.", "model.backbone."),
        ),
        *_families(
            "zamba",
            rotary="none",
            head_dim_key="attention_head_dim",
            attention_input_key="attention_hidden_size",
            without_attention=("mamba", "mamba_decoder"),
            document_barrier=_CARRIED,
        ),
        *_families(
            "zamba2",
            head_dim_key="attention_head_dim",
            attention_input_key="attention_hidden_size",
            without_attention=("mamba", "mamba_decoder"),
            document_barrier=_CARRIED,
            refused_when=(("use_shared_attention_adapter", "adapters beside its projections write to every K/V head"),),
        ),
        *_families(
            "recurrent_gemma",
            attention=("temporal_block",),
            without_attention=("temporal_block.conv_1d",),
            document_barrier=_CARRIED,
        ),
        *_families(
            "apertus dots1 exaone4 exaone_moe flint gemma3_text glm4_moe hy_v3 kolibri1 mellum qwen3 qwen3_moe",
            key_norm="shared",
        ),
        *_families("lfm3", key_norm="shared", document_barrier=_CARRIED, without_attention=("conv",)),
        *_families("afmoe", key_norm="shared", value_constraint=_GATED, document_mask="masks_by_kind"),
        *_families("beam", key_norm="shared", value_constraint=_GATED),
        *_families(
            "gemma3n_text",
            key_norm="shared",
            value_constraint="its values are normalised behind their projection",
            order_constrained_when=(("num_kv_shared_layers", "layers share keys and values"),),
            shared_layers_key="num_kv_shared_layers",
        ),
        *_families("nanochat", key_norm="shared", key_constraint="its keys are normalised behind their projection"),
        *_families(
            "qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp_text",
            key_norm="shared",
            query_outputs=2,
            value_constraint=_GATED,
            order_constraints=(("decoder", _GATED),),
            document_barrier=_CARRIED,
            without_attention=("linear_attn",),
        ),
        *_families("hunyuan_v1_dense hunyuan_v1_moe", key_norm="shared", key_norm_name="key_layernorm"),
        *_families(
            "lfm2 lfm2_moe",
            key_norm="shared",
            key_norm_name="k_layernorm",
            output="out_proj",
            document_barrier=_CARRIED,
            without_attention=("conv",),
        ),
        *_families("phi", key_norm="shared", key_norm_name="k_layernorm", output="dense"),
        *_families("cohere", rotary="interleaved", key_norm="per_head"),
        *_families("stablelm", key_norm="per_head_list", key_norm_name="k_layernorm.norms"),
        *_families("flex_olmo minimax_m2 olmo2 olmo3 olmoe", key_norm="full"),
        *_families("olmo_hybrid", key_norm="full", document_barrier=_CARRIED, without_attention=("linear_attn",)),
        *_families("phi3 phi4_multimodal", fused="qkv_proj"),
        *_families(
            "dbrx",
            **_placed("blocks", "n_layers", "transformer"),
            hidden_key="d_model",
            attention=("norm_attn_norm.attn",),
            fused="Wqkv",
            output="out_proj",
            heads_key="n_heads",
            kv_heads_keys=("attn_config.kv_n_heads", "num_key_value_heads"),
            head_dim_key=None,
        ),
        Family(
            model_type="chatglm",
            **_placed("encoder.layers", "num_layers", "transformer"),
            attention=("self_attention",),
            fused="query_key_value",
            output="dense",
            rotary="interleaved",
            kv_heads_keys=("multi_query_group_num",),
            head_dim_key="kv_channels",
            refused_unless=(("multi_query_attention", "only ChatGLM2 and later have K/V heads of their own"),),
            engines=frozenset(),
        ),
        *_own_file(
            "gqa_t5",
            {"t5": "T5", "mt5": "MT5", "umt5": "UMT5"},
            "Model ForConditionalGeneration EncoderModel ForSequenceClassification ForTokenClassification ForQuestionAnswering",
            **_T5,
        ),
        *_own_file(
            "gqa_t5",
            {"longt5": "LongT5", "switch_transformers": "SwitchTransformers"},
            "Model ForConditionalGeneration",
            **_T5,
        ),
        *_own_file(
            "gqa_bart",
            {"bart": "Bart"},
            "Model ForConditionalGeneration ForCausalLM ForSequenceClassification ForQuestionAnswering",
            **_BART,
        ),
        *_own_file(
            "gqa_bart",
            {"plbart": "PLBart"},
            "Model ForConditionalGeneration ForCausalLM ForSequenceClassification",
            decoder_starts_with_last=True,
            **_BART,
        ),
        *_own_file(
            "gqa_bart",
            {"mbart": "MBart"},
            "Model ForConditionalGeneration ForCausalLM ForSequenceClassification ForQuestionAnswering",
            decoder_starts_with_last=True,
            **_BART,
        ),
        *_own_file(
            "gqa_bart",
            {"pegasus": "Pegasus", "blenderbot": "Blenderbot", "blenderbot-small": "BlenderbotSmall"},
            "Model ForConditionalGeneration ForCausalLM",
            **_BART,
        ),
        *_own_file("gqa_bart", {"m2m_100": "M2M100"}, "Model ForConditionalGeneration", **_BART),
        *_own_file("gqa_bart", {"marian": "Marian"}, "Model MTModel ForCausalLM", **_BART),
        *_own_file(
            "gqa_whisper",
            {"whisper": "Whisper"},
            "Model ForConditionalGeneration ForCausalLM ForAudioClassification",
            autos=_SPEECH_TASKS,
            order_constraints=(("cross", "word timestamps are read from heads by their numbers"),),
            **_BART | {"document_barrier": None},
        ),
        *_own_file(
            "gqa_opt",
            {"opt": "OPT"},
            "Model ForCausalLM ForSequenceClassification ForQuestionAnswering",
            **_placed("decoder.layers", "num_hidden_layers", "model"),
            output="out_proj",
            rotary="none",
            head_dim_key=None,
            document_mask="mask",
        ),
        *_own_file(
            "gqa_biogpt",
            {"biogpt": "BioGpt"},
            "Model ForCausalLM ForSequenceClassification ForTokenClassification",
            **_placed("layers", "num_hidden_layers", "biogpt"),
            output="out_proj",
            rotary="none",
            head_dim_key=None,
            document_mask="mask",
        ),
        *_own_file(
            "gqa_gpt2",
            {"gpt2": "GPT2"},
            "Model LMHeadModel ForSequenceClassification ForTokenClassification ForQuestionAnswering",
            **_placed("h", "n_layer num_hidden_layers", "transformer"),
            hidden_key="n_embd",
            attention=("attn", "crossattention"),
            cross_attention=("crossattention",),
            fused="c_attn",
            query="q_attn",
            output="c_proj",
            transposed=True,
            rotary="none",
            heads_key="n_head",
            head_dim_key=None,
        ),
        *_own_file(
            "gqa_gpt_neo",
            {"gpt_neo": "GPTNeo"},
            "Model ForCausalLM ForSequenceClassification ForTokenClassification ForQuestionAnswering",
            **_placed("h", "num_layers num_hidden_layers", "transformer"),
            attention=("attn.attention",),
            output="out_proj",
            rotary="none",
            heads_key="num_heads",
            head_dim_key=None,
        ),
        *_own_file(
            "gqa_gptj",
            {"gptj": "GPTJ"},
            "Model ForCausalLM ForSequenceClassification ForQuestionAnswering",
            **_placed("h", "n_layer num_hidden_layers", "transformer"),
            hidden_key="n_embd",
            attention=("attn",),
            output="out_proj",
            rotary="interleaved",
            heads_key="n_head",
            head_dim_key=None,
        ),
        *_own_file(
            "gqa_codegen",
            {"codegen": "CodeGen"},
            "Model ForCausalLM",
            **_placed("h", "n_layer num_hidden_layers", "transformer"),
            hidden_key="n_embd",
            attention=("attn",),
            fused="qkv_proj",
            fused_layout="quarters",
            output="out_proj",
            rotary="interleaved",
            heads_key="n_head",
            head_dim_key=None,
        ),
        *_own_file(
            "gqa_gpt_neox",
            {"gpt_neox": "GPTNeoX"},
            "Model ForCausalLM ForSequenceClassification ForTokenClassification ForQuestionAnswering",
            **_placed("layers", "num_hidden_layers", "gpt_neox"),
            attention=("attention",),
            **_PER_HEAD,
        ),
        *_own_file(
            "gqa_persimmon",
            {"persimmon": "Persimmon"},
            "Model ForCausalLM ForSequenceClassification ForTokenClassification",
            key_norm="shared",
            key_norm_name="k_layernorm",
            **_PER_HEAD,
        ),
        *_own_file(
            "gqa_bloom",
            {"bloom": "Bloom"},
            "Model ForCausalLM ForSequenceClassification ForTokenClassification ForQuestionAnswering",
            **_placed("h", "n_layer num_hidden_layers", "transformer"),
            attention=("self_attention",),
            rotary="none",
            heads_key="n_head",
            order_constraints=_SLOPED,
            document_barrier=_PADDING_ONLY,
            **_PER_HEAD,
        ),
        *_own_file(
            "gqa_falcon",
            {"falcon": "Falcon"},
            "Model ForCausalLM ForSequenceClassification ForTokenClassification ForQuestionAnswering",
            **_placed("h", "num_hidden_layers n_layer", "transformer"),
            attention=("self_attention",),
            kv_heads="falcon",
            order_constrained_when=(("alibi", _SLOPED[0][1]),),
            document_mask="mask",
            document_barred_when=(("alibi", _PADDING_ONLY),),
            **_PER_HEAD,
        ),
        *_own_file(
            "gqa_mpt",
            {"mpt": "Mpt"},
            "Model ForCausalLM ForSequenceClassification ForTokenClassification ForQuestionAnswering",
            **_placed("blocks", "n_layers num_hidden_layers", "transformer"),
            hidden_key="d_model",
            attention=("attn",),
            fused="Wqkv",
            output="out_proj",
            rotary="none",
            heads_key="n_heads",
            head_dim_key=None,
            order_constraints=_SLOPED,
            document_mask="mask",
            refused_values=_GROUPED_MPT,
        ),
    )
}

# Each reason ends the sentence "model type X can't be converted: ...".
_REFUSED: dict[str, str] = {
    "its attention has no K/V-head count in transformers, and there is no modelling file for it": """
        bigbird_pegasus cpmant ctrl fsmt git gpt-sw3 gpt_neox_japanese hrm_text modernbert-decoder musicgen musicgen_melody
        mvp nllb-moe openai-gpt pegasus_x prophetnet reformer seamless_m4t seamless_m4t_v2 xlm xlnet
    """,
    "its attention has no K/V-head count in transformers and there is no modelling file for it; opt is the nearest type that has one, with "
    "learned positions where this one has sinusoids: convert another model, or write a file as docs/adding-a-family.md says": "xglm",
    "its attention has no K/V-head count in transformers and there is no modelling file for it; bart is the nearest type that has one: its "
    "decoder is the same but its encoder is not a Longformer, so that an LED can't become one": "led",
    "its attention has no K/V-head count in transformers and there is no modelling file for it, and it comes as the decoder of a "
    "vision-encoder-decoder, which holds two models; bart is the nearest type that has one": "trocr",
    "in transformers it has one K/V head or as many as query heads, and nothing between": "gpt_bigcode",
    "it is an encoder, whose attention has no K/V-head count in transformers": """
        bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
        roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod
    """,
    "it has no attention, so that it keeps no K/V cache": "falcon_mamba mamba mamba2 rwkv xlstm",
    "its multi-head latent attention caches one latent vector per token and has no K/V heads to merge": """
        axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 dots3_note_text glm4_moe_lite glm_moe_dsa hy_v4
        kimi_linear longcat_flash minicpm3 youtu
    """,
    "it has a single K/V head already": "deepseek_v4",
    "it holds several models with a config each, and only a language model by itself is read: save that alone first": """
        audioflamingo3 aya_vision blt chameleon dots3_note emu3 encoder-decoder fuyu gemma3 gemma3n gemma4
        gemma4_assistant gemma4_unified gemma4_unified_assistant glmasr got_ocr2 granite_speech granite_speech_plus
        idefics3 internvl llama4 llava llava_next mistral3 mllama moshi moss_transcribe_diarize musicflamingo
        nemo_speechlm paligemma pixtral qwen2_5_vl qwen2_audio qwen2_vl qwen3_5 qwen3_5_moe qwen3_asr qwen3_vl
        qwen3_vl_moe qwen4_exp smolvlm speech-encoder-decoder t5gemma t5gemma2 vibevoice_asr vision-encoder-decoder voxtral voxtral_realtime
    """,
    "its layers differ in their K/V heads, which are counted by further config keys": """
        gemma4_text gemma4_unified_text inkling2_text inkling_text mimo_v2_flash
    """,
    "its layers differ in their number of query heads": "laguna",
    "its differential attention splits the values over pairs of K/V heads": "diffllama",
    "its attention mask is computed from the values, with parameters for each K/V head": "doge",
    "its query heads are experts, counted by the K/V heads": "jetmoe",
    "its sparse attention selects blocks of keys once for each K/V head": "minimax_m3_vl_text",
    "convolutions mix its queries and keys after the projections": "zaya",
}

RESTATED: dict[str, str] = {
    "Yi": "llama",
    "baichuan": "llama",
    "internlm": "llama",
    "internlm2": "llama",
    "open_llama": "llama",
    "minicpm": "granite",
    "phi-msft": "phi",
    "qwen": "qwen2",
    "RefinedWeb": "falcon",
    "RefinedWebModel": "falcon",
    "stablelm_epoch": "stablelm",
}
"""Model types that load by code of their own, and the stock type that computes the same; `restating` rewrites the one
as the other.
"""

REFUSALS: dict[str, Refusal] = {
    model_type: Refusal(model_type, reason)
    for reason, model_types in _REFUSED.items()
    for model_type in model_types.split()
}


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
    if model_type in RESTATED:
        raise UnsupportedFamilyError(
            f"model type {model_type} loads by code of its own and can't be converted as it is: `gqa-convert restate SOURCE STOCK` writes "
            f"it as a {RESTATED[model_type]}, which computes the same; convert STOCK"
        )
    raise UnsupportedFamilyError(
        f"model type {model_type!r} is unknown: docs/families.md lists the {len(FAMILIES)} that work and "
        "docs/adding-a-family.md says how to add one"
    )
