"""The config of a target architecture, written from the config of its source."""

import copy

from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.families.source_sizes import Config, Dimensions, Rotary, count, read_dimensions, read_rotary
from gqa_convert.families.target_architectures import ORIGINS, TargetArchitecture


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Keys of the source types that mean nothing, or something else, in a target; all that a target reads is written anew.
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


def translate_config(config: Config, target_architecture: TargetArchitecture, groups: int) -> JsonObject:
    """The target's config.json for a source's, with the keys of transformers 4 and 5.

    Keys that belong neither to the source's type nor to the target's are copied.
    """
    dimensions = read_dimensions(config)
    result = {key: copy.deepcopy(value) for key, value in config.items() if key not in _SOURCE_KEYS}
    names = dict(target_architecture.architectures)
    architectures = config.get("architectures") or [target_architecture.architectures[0][0]]
    common = {
        "architectures": [names[name] for name in architectures],
        "model_type": target_architecture.model_type,
        "vocab_size": count(config, "vocab_size"),
        "initializer_range": config.get("initializer_range", 0.02),
        "use_cache": config.get("use_cache", True),
        "tie_word_embeddings": config.get("tie_word_embeddings", ORIGINS[target_architecture.source_type].tied),
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
    if result.get("tokenizer_class") is None:  # else the target's tokenizer class would be chosen
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
    drop: JsonObject,
    epsilon: float,
    activation: str,
) -> JsonObject:
    """The entries that phi and starcoder2 share."""
    rotary = read_rotary(config, dimensions)
    assert isinstance(rotary, Rotary)  # else there would be no target
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
        "hidden_size": dimensions.hidden_size,
        "intermediate_size": dimensions.intermediate_size,
        "num_hidden_layers": dimensions.layers,
        "num_attention_heads": dimensions.heads,
        "hidden_act": activation,
        "attention_dropout": drop["attention"],
        "rope_theta": rotary.theta,
        "rope_scaling": scaling or None,
        "rope_parameters": parameters,
    } | specific


def _from_gpt_neox(config: Config, target_architecture: TargetArchitecture, dimensions: Dimensions) -> JsonObject:
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


def _from_gptj(config: Config, target_architecture: TargetArchitecture, dimensions: Dimensions) -> JsonObject:
    drop = {
        name: config.get(key, 0.0)
        for name, key in (("residual", "resid_pdrop"), ("embedding", "embd_pdrop"), ("attention", "attn_pdrop"))
    }
    epsilon, activation = config.get("layer_norm_epsilon", 1e-5), config.get("activation_function", "gelu_new")
    positions = config.get("n_positions", config.get("max_position_embeddings", 2048))
    return _decoder(config, target_architecture, dimensions, drop, epsilon, activation) | {
        "max_position_embeddings": positions
    }


def _from_gpt2(config: Config, target_architecture: TargetArchitecture, dimensions: Dimensions) -> JsonObject:
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
        "n_embd": dimensions.hidden_size,
        "n_head": dimensions.heads,
        "n_layer": dimensions.layers,
        "n_positions": config.get("n_positions", config.get("max_position_embeddings", 1024)),
        "add_cross_attention": False,
        "multi_query": True,
        "scale_attn_weights": True,
        "attention_softmax_in_fp32": True,
        "scale_attention_softmax_in_fp32": True,
    }
