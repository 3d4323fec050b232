"""Which stock class with a K/V-head count computes the same function as a source that has none, and its config. Data,
no arrays.

A home is exact: with as many K/V heads as the source has, its logits are the source's up to rounding. What would break
that is a reason to have no home.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any, Final

from gqa_convert.errors import ConfigError
from gqa_convert.families.engines import run_in
from gqa_convert.families.layouts import FusedLayout
from gqa_convert.families.table import FAMILIES, Family, find_family

Config = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names of one model type's tensors on disk, without `.weight` and `.bias`; a layer's are below
    `<layers>.<number>.`.
    """

    prefix: str
    """What precedes the names of the model without its head, except in a checkpoint of that model alone."""
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
    """Names that the output projection goes by; the first is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A model type without a K/V-head count, as far as a translation needs it."""

    model_type: str
    names: Names
    attention_biases: bool
    head_bias: bool
    stale: tuple[str, ...]
    """Ends of names of buffers that old versions saved and no class reads."""

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
    names: Names
    head_bias: bool
    folds_norms: bool
    """Its one norm stands for two of the source's: their gains and biases move into the projections behind them."""
    architectures: tuple[tuple[str, str], ...]
    kv_heads_key: str
    special_tokens: tuple[tuple[str, str], ...] = ()
    """Keys that tokenizer_config.json needs where it lacks them: the source's tokenizer class has them by default, the
    home's has none.
    """


@dataclass(frozen=True, slots=True)
class NoTargetArchitecture:
    """No stock class is an exact home."""

    reason: str
    """Ends the sentence "it has no native home: "."""


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
        stale=_STALE,
    ),
    "codegen": Origin(
        model_type="codegen",
        names=_CODEGEN,
        attention_biases=False,
        head_bias=True,
        stale=_STALE,
    ),
    "gpt2": Origin(
        model_type="gpt2",
        names=_GPT2,
        attention_biases=True,
        head_bias=False,
        stale=_STALE,
    ),
}

PHI_FROM_GPT_NEOX: Final = TargetArchitecture(
    source_type="gpt_neox",
    model_type="phi",
    names=_PHI,
    head_bias=True,
    folds_norms=True,
    kv_heads_key="num_key_value_heads",
    architectures=(("GPTNeoXForCausalLM", "PhiForCausalLM"), ("GPTNeoXModel", "PhiModel")),
)
STARCODER2_FROM_GPT_NEOX: Final = TargetArchitecture(
    source_type="gpt_neox",
    model_type="starcoder2",
    names=_STARCODER2,
    head_bias=False,
    folds_norms=False,
    kv_heads_key="num_key_value_heads",
    architectures=(("GPTNeoXForCausalLM", "Starcoder2ForCausalLM"), ("GPTNeoXModel", "Starcoder2Model")),
)
PHI_FROM_GPTJ: Final = TargetArchitecture(
    source_type="gptj",
    model_type="phi",
    names=_PHI,
    head_bias=True,
    folds_norms=False,
    kv_heads_key="num_key_value_heads",
    architectures=(("GPTJForCausalLM", "PhiForCausalLM"), ("GPTJModel", "PhiModel")),
)
PHI_FROM_CODEGEN: Final = TargetArchitecture(
    source_type="codegen",
    model_type="phi",
    names=_PHI,
    head_bias=True,
    folds_norms=False,
    kv_heads_key="num_key_value_heads",
    architectures=(("CodeGenForCausalLM", "PhiForCausalLM"), ("CodeGenModel", "PhiModel")),
)
GPT_BIGCODE_FROM_GPT2: Final = TargetArchitecture(
    source_type="gpt2",
    model_type="gpt_bigcode",
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

_GELUS = frozenset({"gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"})
"""Activations that llama.cpp computes by one approximation of GELU, as it does for every model of these
architectures.
"""

_ROPE_TYPES = frozenset({"default", "linear", "dynamic", "yarn", "longrope", "llama3"})
"""Kinds of rotary scaling that source and home compute with one function of transformers."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Keys of the source types that mean nothing, or something else, to the homes; all that a home reads is written anew.
_SOURCE_KEYS = _words(
    """
    activation_function add_cross_attention architectures attention_bias attention_dropout attn_pdrop classifier_dropout
    embd_pdrop embedding_dropout head_dim hidden_act hidden_dropout hidden_size intermediate_size layer_norm_eps
    layer_norm_epsilon max_position_embeddings model_type n_ctx n_embd n_head n_inner n_layer n_positions norm_epsilon
    num_attention_heads num_hidden_layers num_key_value_heads partial_rotary_factor qk_layernorm reorder_and_upcast_attn
    resid_pdrop residual_dropout rope_parameters rope_scaling rope_theta rotary rotary_dim rotary_emb_base rotary_pct
    scale_attn_by_inverse_layer_idx scale_attn_weights sliding_window summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj use_bias use_parallel_residual
    """
)


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary positions: how many of a head's rows turn, and how fast."""

    rotated: int
    factor: float
    theta: float
    scaling: tuple[tuple[str, Any], ...]
    """Keys of a scaling beyond its base, `rope_type` among them; none for the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """The counts of a source's config."""

    heads: int
    layers: int
    width: int
    """Rows of one head."""
    hidden: int
    inner: int
    """Rows of the MLP's first projection."""


def find_target_architecture(config: Config, groups: int) -> TargetArchitecture | NoTargetArchitecture:
    """The exact native home of a source with `groups` K/V heads, or why it has none.

    Raises:
        ConfigError: a count is missing from the config or absurd.
    """
    model_type = config.get("model_type")
    target_architecture = _target_of_type(config, groups)
    if isinstance(target_architecture, NoTargetArchitecture):
        return target_architecture
    if "auto_map" in config:
        return NoTargetArchitecture(
            f"the checkpoint brings {model_type} code of its own, which may compute something else"
        )
    architectures = config.get("architectures") or []
    if len(architectures) > 1 or not set(architectures) <= {source for source, _ in target_architecture.architectures}:
        return NoTargetArchitecture(
            f"{target_architecture.model_type} stands for language models, and this is a {', '.join(map(str, architectures))}"
        )
    dimensions = read_dimensions(config)
    if target_architecture.source_type == "gpt2":
        return target_architecture
    rotary = read_rotary(config, dimensions)
    if isinstance(rotary, NoTargetArchitecture):
        return rotary
    if target_architecture.model_type == "starcoder2" and rotary.rotated != dimensions.width:
        return NoTargetArchitecture(
            f"sequential blocks with rotary positions on {rotary.rotated} of {dimensions.width} rows of a head have no stock class "
            "with a K/V-head count (starcoder2 turns all)"
        )
    if target_architecture.source_type == "codegen" and dimensions.heads % 4:
        raise ConfigError(
            f"config.json has {dimensions.heads} heads, and codegen needs a multiple of 4: repair the config"
        )
    pad, vocabulary = config.get("pad_token_id"), config.get("vocab_size")
    if isinstance(pad, int) and isinstance(vocabulary, int) and not -vocabulary <= pad < vocabulary:
        return NoTargetArchitecture(
            f"{target_architecture.model_type} needs a padding token inside its vocabulary, and pad_token_id is {pad}"
        )
    return target_architecture


def family_of_result(model_type: str) -> Family:
    """The record by which the attention of a source or of a result is found.

    A target architecture without a record of its own names its tensors as its source does.

    Raises:
        UnsupportedFamilyError: the model type is unknown.
    """
    if model_type not in FAMILIES:
        for target in TARGETS:
            if target.model_type == model_type and target.names is ORIGINS[target.source_type].names:
                return FAMILIES[target.source_type]
    return find_family(model_type)


def engines_of(target_architecture: TargetArchitecture) -> frozenset[str]:
    """Software that loads the home's grouped-query form without custom code."""
    return frozenset({"transformers"}) | run_in(target_architecture.model_type)


def engines_for(config: Config, target_architecture: TargetArchitecture) -> frozenset[str]:
    """Software that computes what this source computes: some engines have one activation and plain rotary positions,
    whatever is asked.
    """
    activation = (
        config.get("hidden_act", "gelu")
        if target_architecture.source_type == "gpt_neox"
        else config.get("activation_function", "gelu_new")
    )
    engines = engines_of(target_architecture)
    if activation not in _GELUS:
        engines -= {"llama.cpp"}
    if target_architecture.source_type == "gpt_neox":
        rotary = read_rotary(config, read_dimensions(config))
        if isinstance(rotary, Rotary) and rotary.scaling:
            engines &= {"transformers"}
    return engines


def _target_of_type(config: Config, groups: int) -> TargetArchitecture | NoTargetArchitecture:
    model_type = config.get("model_type")
    if model_type == "gpt_neox":
        return PHI_FROM_GPT_NEOX if config.get("use_parallel_residual", True) else STARCODER2_FROM_GPT_NEOX
    if model_type == "gptj":
        return PHI_FROM_GPTJ
    if model_type == "codegen":
        return PHI_FROM_CODEGEN
    if model_type == "gpt2":
        if config.get("add_cross_attention"):
            return NoTargetArchitecture("gpt_bigcode has no cross-attention with a single K/V head")
        if groups != 1:
            return NoTargetArchitecture(
                "the stock class that is GPT-2 otherwise, gpt_bigcode, has one K/V head or all, and nothing between"
            )
        return GPT_BIGCODE_FROM_GPT2
    return NoTargetArchitecture(f"no stock class is known to compute what {model_type} does with fewer K/V heads")


def read_dimensions(config: Config) -> Dimensions:
    """The counts of a source's config.

    Raises:
        ConfigError: one is missing or absurd, or the heads do not divide the width.
    """
    if config.get("model_type") == "gpt_neox":
        hidden, heads, layers, inner = (
            _count(config, key)
            for key in ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size")
        )
    else:
        hidden, heads, layers = (
            _count(config, *keys)
            for keys in (("n_embd", "hidden_size"), ("n_head", "num_attention_heads"), ("n_layer", "num_hidden_layers"))
        )
        inner = 4 * hidden if config.get("n_inner") is None else _count(config, "n_inner")
    if hidden % heads:
        raise ConfigError(f"config.json has {heads} heads, which do not divide a width of {hidden}: repair the config")
    return Dimensions(heads=heads, layers=layers, width=hidden // heads, hidden=hidden, inner=inner)


def read_rotary(config: Config, dimensions: Dimensions) -> Rotary | NoTargetArchitecture:
    """How a source's keys turn with their position, read as transformers reads it."""
    width = dimensions.width
    if config.get("model_type") != "gpt_neox":
        rotated = config.get("rotary_dim", 64)
        if type(rotated) is not int or not 0 < rotated <= width or rotated % 2:
            return NoTargetArchitecture(f"rotary_dim = {rotated!r} is no even count of up to {width} rows of a head")
        return Rotary(rotated, _factor(rotated, width), 10000.0, ())
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(parameters, dict) or any(isinstance(value, dict) for value in parameters.values()):
        return NoTargetArchitecture("its rotary parameters differ between layers")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in _ROPE_TYPES:
        return NoTargetArchitecture(f"rotary scaling of type {kind!r} is not known to be computed alike")
    theta: Any = parameters.get("rope_theta", config.get("rotary_emb_base", 10000))
    factor: Any = parameters.get("partial_rotary_factor", config.get("rotary_pct", 0.25))
    if (
        not all(type(value) in (int, float) and math.isfinite(value) and value > 0 for value in (theta, factor))
        or factor > 1
    ):
        return NoTargetArchitecture(f"a rotary base of {theta!r} on a part of {factor!r} of each head makes no sense")
    rotated = int(width * factor)
    if not rotated or rotated % 2:
        return NoTargetArchitecture(f"rotary positions on {rotated} of {width} rows of a head are no pairs")
    base = {"rope_theta", "partial_rotary_factor", "rope_type", "type"}
    scaling = {key: value for key, value in parameters.items() if key not in base}
    return Rotary(rotated, factor, theta, () if kind == "default" else tuple(({"rope_type": kind} | scaling).items()))


def _factor(rotated: int, width: int) -> float:
    """The factor that clients turn back into `rotated` by int(width * factor)."""
    factor = rotated / width
    return factor if int(width * factor) == rotated else math.nextafter(factor, 1.0)


def _count(config: Config, *keys: str) -> int:
    value = next((config[key] for key in keys if config.get(key) is not None), None)
    if type(value) is not int or value < 1:
        raise ConfigError(f"config.json has {keys[0]} = {value!r} where a count belongs: repair the config")
    return value


def query_scale(config: Config, dimensions: Dimensions, layer: int) -> float:
    """What the queries of a layer are multiplied with, because the home scales its scores by 1 / sqrt(head width) and
    nothing else.

    gpt_bigcode can leave that factor out, too, but only transformers heeds its switch.
    """
    scale = 1.0
    if config.get("model_type") == "gpt2":
        if not config.get("scale_attn_weights", True):
            scale *= math.sqrt(dimensions.width)
        if config.get("scale_attn_by_inverse_layer_idx"):
            scale /= layer + 1
    return scale


def translate_config(config: Config, target_architecture: TargetArchitecture, groups: int) -> Config:
    """The home's config.json for a source's, in the words of old and new clients.

    Keys that are neither the source type's nor the home's stay as they are.
    """
    dimensions = read_dimensions(config)
    result = {key: copy.deepcopy(value) for key, value in config.items() if key not in _SOURCE_KEYS}
    names = dict(target_architecture.architectures)
    architectures = config.get("architectures") or [target_architecture.architectures[0][0]]
    common = {
        "architectures": [names[name] for name in architectures],
        "model_type": target_architecture.model_type,
        "vocab_size": _count(config, "vocab_size"),
        "initializer_range": config.get("initializer_range", 0.02),
        "use_cache": config.get("use_cache", True),
        "tie_word_embeddings": config.get("tie_word_embeddings", target_architecture.source_type == "gpt2"),
    }
    neox = target_architecture.source_type == "gpt_neox"
    tokens = {"bos_token_id": 0 if neox else 50256, "eos_token_id": 2 if neox else 50256, "pad_token_id": None}
    common |= {key: config.get(key, default) for key, default in tokens.items()}
    specific = {"gpt_neox": _from_gpt_neox, "gptj": _from_gptj, "codegen": _from_gptj, "gpt2": _from_gpt2}[
        target_architecture.source_type
    ]
    result |= common | specific(config, target_architecture, dimensions)
    dtype = config.get("dtype", config.get("torch_dtype"))
    if dtype is not None:
        result |= {"dtype": dtype, "torch_dtype": dtype}
    if result.get("tokenizer_class") is None:  # else clients would take the home's, which splits text in its own way
        result["tokenizer_class"] = ORIGINS[target_architecture.source_type].tokenizer
    return result | {
        target_architecture.kv_heads_key: groups,
        "multi_query_attention": True,
        "multi_query_group_num": groups,
    }


def _decoder(
    config: Config,
    target_architecture: TargetArchitecture,
    dimensions: Dimensions,
    drop: dict[str, Any],
    epsilon: float,
    activation: str,
) -> Config:
    """What phi and starcoder2 share."""
    rotary = read_rotary(config, dimensions)
    assert isinstance(rotary, Rotary)  # else it would have no home
    scaling = dict(rotary.scaling)
    parameters = {"rope_type": "default"} | scaling | {"rope_theta": rotary.theta}
    if target_architecture.model_type == "phi":
        parameters["partial_rotary_factor"] = rotary.factor
        specific = {
            "layer_norm_eps": epsilon,
            "partial_rotary_factor": rotary.factor,
            "qk_layernorm": False,
            "resid_pdrop": drop["residual"],
            "embd_pdrop": drop["embedding"],
        }
    else:
        specific = {
            "norm_epsilon": epsilon,
            "use_bias": True,
            "sliding_window": None,
            "residual_dropout": drop["residual"],
            "embedding_dropout": drop["embedding"],
        }
    return {
        "hidden_size": dimensions.hidden,
        "intermediate_size": dimensions.inner,
        "num_hidden_layers": dimensions.layers,
        "num_attention_heads": dimensions.heads,
        "hidden_act": activation,
        "attention_dropout": drop["attention"],
        "rope_theta": rotary.theta,
        "rope_scaling": scaling or None,
        "rope_parameters": parameters,
    } | specific


def _from_gpt_neox(config: Config, target_architecture: TargetArchitecture, dimensions: Dimensions) -> Config:
    hidden = config.get("hidden_dropout", 0.0)
    drop = {"residual": hidden, "embedding": hidden, "attention": config.get("attention_dropout", 0.0)}
    translated = _decoder(
        config,
        target_architecture,
        dimensions,
        drop,
        config.get("layer_norm_eps", 1e-5),
        config.get("hidden_act", "gelu"),
    )
    return translated | {"max_position_embeddings": config.get("max_position_embeddings", 2048)}


def _from_gptj(config: Config, target_architecture: TargetArchitecture, dimensions: Dimensions) -> Config:
    drop = {
        name: config.get(key, 0.0)
        for name, key in (("residual", "resid_pdrop"), ("embedding", "embd_pdrop"), ("attention", "attn_pdrop"))
    }
    epsilon, activation = config.get("layer_norm_epsilon", 1e-5), config.get("activation_function", "gelu_new")
    positions = config.get("n_positions", config.get("max_position_embeddings", 2048))
    return _decoder(config, target_architecture, dimensions, drop, epsilon, activation) | {
        "max_position_embeddings": positions
    }


def _from_gpt2(config: Config, target_architecture: TargetArchitecture, dimensions: Dimensions) -> Config:
    assert target_architecture.model_type == "gpt_bigcode"
    same = {
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "n_inner": None,
    }
    return {key: config.get(key, default) for key, default in same.items()} | {
        "n_embd": dimensions.hidden,
        "n_head": dimensions.heads,
        "n_layer": dimensions.layers,
        "n_positions": config.get("n_positions", config.get("max_position_embeddings", 1024)),
        "add_cross_attention": False,
        "multi_query": True,
        "scale_attn_weights": True,
        "attention_softmax_in_fp32": True,
        "scale_attention_softmax_in_fp32": True,
    }
