"""The check on the config of a translated OUT, by rules over SOURCE's config that the converter does not share."""

from dataclasses import dataclass
from typing import Any

from gqa_convert.verify.checkpoint_reader import CONFIG
from gqa_convert.verify.json_values import same_json
from gqa_convert.verify.report import Failure, Finding
from gqa_convert.verify.translated.sizes import Sizes, first_of
from gqa_convert.verify.translated.target_architectures import TargetArchitecture


@dataclass(frozen=True, slots=True)
class Rule:
    """Where a value of OUT's config comes from."""

    key: str
    """OUT's key."""
    source_keys: str
    """SOURCE's keys with the same meaning, separated by spaces; the first that is present counts."""
    default: Any
    """The default of SOURCE's class, which applies if none is present."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ALL: tuple[Rule, ...] = (Rule("initializer_range", "initializer_range", 0.02), Rule("use_cache", "use_cache", True))

_FROM_NEOX: tuple[Rule, ...] = (
    *_ALL,
    Rule("hidden_act", "hidden_act", "gelu"),
    Rule("max_position_embeddings", "max_position_embeddings", 2048),
    Rule("attention_dropout", "attention_dropout", 0.0),
    Rule("tie_word_embeddings", "tie_word_embeddings", False),
    Rule("bos_token_id", "bos_token_id", 0),
    Rule("eos_token_id", "eos_token_id", 2),
    Rule("pad_token_id", "pad_token_id", None),
)
_GPT_TOKENS: tuple[Rule, ...] = (
    Rule("bos_token_id", "bos_token_id", 50256),
    Rule("eos_token_id", "eos_token_id", 50256),
    Rule("pad_token_id", "pad_token_id", None),
)

_RULES: dict[tuple[str, str], tuple[Rule, ...]] = {
    ("gpt_neox", "phi"): (
        *_FROM_NEOX,
        Rule("layer_norm_eps", "layer_norm_eps", 1e-5),
        Rule("resid_pdrop", "hidden_dropout", 0.0),
        Rule("embd_pdrop", "hidden_dropout", 0.0),
    ),
    ("gpt_neox", "starcoder2"): (
        *_FROM_NEOX,
        Rule("norm_epsilon", "layer_norm_eps", 1e-5),
        Rule("residual_dropout", "hidden_dropout", 0.0),
        Rule("embedding_dropout", "hidden_dropout", 0.0),
    ),
    ("gptj", "phi"): (
        *_ALL,
        *_GPT_TOKENS,
        Rule("hidden_act", "activation_function", "gelu_new"),
        Rule("layer_norm_eps", "layer_norm_epsilon", 1e-5),
        Rule("max_position_embeddings", "n_positions max_position_embeddings", 2048),
        Rule("resid_pdrop", "resid_pdrop", 0.0),
        Rule("embd_pdrop", "embd_pdrop", 0.0),
        Rule("attention_dropout", "attn_pdrop", 0.0),
        Rule("tie_word_embeddings", "tie_word_embeddings", False),
    ),
    ("gpt2", "gpt_bigcode"): (
        *_ALL,
        *_GPT_TOKENS,
        Rule("activation_function", "activation_function", "gelu_new"),
        Rule("layer_norm_epsilon", "layer_norm_epsilon", 1e-5),
        Rule("n_positions", "n_positions max_position_embeddings", 1024),
        Rule("n_inner", "n_inner", None),
        Rule("resid_pdrop", "resid_pdrop", 0.1),
        Rule("embd_pdrop", "embd_pdrop", 0.1),
        Rule("attn_pdrop", "attn_pdrop", 0.1),
        Rule("tie_word_embeddings", "tie_word_embeddings", True),
    ),
}
_RULES["codegen", "phi"] = _RULES["gptj", "phi"]

_FIXED: dict[str, dict[str, Any]] = {
    "phi": {"qk_layernorm": False},
    "starcoder2": {"use_bias": True, "sliding_window": None},
    "gpt_bigcode": {
        "multi_query": True,
        "scale_attn_weights": True,
        "attention_softmax_in_fp32": True,
        "scale_attention_softmax_in_fp32": True,
        "add_cross_attention": False,
    },
}

_TYPE_KEYS = _words(
    """
    activation_function add_cross_attention architectures attention_bias attention_dropout attn_pdrop classifier_dropout embd_pdrop
    embedding_dropout head_dim hidden_act hidden_dropout hidden_size intermediate_size layer_norm_eps layer_norm_epsilon
    max_position_embeddings model_type n_ctx n_embd n_head n_inner n_layer n_positions norm_epsilon num_attention_heads
    num_hidden_layers num_key_value_heads partial_rotary_factor qk_layernorm reorder_and_upcast_attn resid_pdrop residual_dropout
    rope_parameters rope_scaling rope_theta rotary rotary_dim rotary_emb_base rotary_pct scale_attn_by_inverse_layer_idx
    scale_attn_weights sliding_window summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    use_bias use_parallel_residual
    """
)
"""Keys to which one of the types gives its own meaning. OUT has them only where its type needs them."""


def check_translated_config(
    config: dict[str, Any], original: dict[str, Any], target: TargetArchitecture, sizes: Sizes, groups: int
) -> Finding:
    """Compare OUT's config with what follows from SOURCE's.

    Args:
        config: OUT's config.
        original: SOURCE's config.
        target: the translation.
        sizes: SOURCE's sizes.
        groups: K/V heads of OUT.
    """
    expected = _expected(original, target, sizes, groups)
    positions = _check_positions(config, target, sizes)
    for key, value in expected.items():
        if key not in config:
            raise Failure(f"{CONFIG} lacks {key}, expected {value!r}")
        if not same_json(config[key], value):
            raise Failure(f"{CONFIG} has {key} = {config[key]!r}, expected {value!r}")
    rest = set(config) - set(expected) - set(positions)
    for key in sorted(rest | set(original)):
        if key in rest and (key in _TYPE_KEYS or key not in original):
            raise Failure(f"{CONFIG} has {key} = {config[key]!r}, which a {target.out} made from SOURCE does not have")
        if key not in config and key not in _TYPE_KEYS:
            raise Failure(f"{CONFIG} lacks {key}, expected {original[key]!r} as in SOURCE")
        if key in rest and not same_json(config[key], original[key]):
            raise Failure(f"{CONFIG} has {key} = {config[key]!r}, SOURCE has {original[key]!r}")
    follow = len(expected) + len(positions)
    return Finding(
        f"a {target.out}: {follow} values follow from SOURCE's, {len(rest)} are the same ({groups} groups)",
        {"groups": groups},
    )


def _expected(original: dict[str, Any], target: TargetArchitecture, sizes: Sizes, groups: int) -> dict[str, Any]:
    """The entries that OUT must have, except rotary positions."""
    classes = target.classes
    stated = original.get("architectures") or list(classes)[:1]
    expected: dict[str, Any] = {
        "model_type": target.out,
        "architectures": [classes[name] for name in stated],
        "vocab_size": original.get("vocab_size"),
        "num_key_value_heads": groups,
        "multi_query_attention": True,
        "multi_query_group_num": groups,
    }
    if target.out == "gpt_bigcode":
        expected |= {"n_embd": sizes.hidden_size, "n_head": sizes.heads, "n_layer": sizes.layers}
    else:
        expected |= {
            "hidden_size": sizes.hidden_size,
            "num_attention_heads": sizes.heads,
            "num_hidden_layers": sizes.layers,
            "intermediate_size": sizes.intermediate_size,
        }
    expected |= _FIXED[target.out]
    expected |= {
        rule.key: first_of(original, rule.source_keys, rule.default) for rule in _RULES[target.source, target.out]
    }
    dtype = first_of(original, "dtype torch_dtype")
    if dtype is not None:
        expected |= {"dtype": dtype, "torch_dtype": dtype}
    if original.get("tokenizer_class") is None:  # otherwise software would take the class of OUT's type
        expected["tokenizer_class"] = target.tokenizer
    return expected


def _check_positions(config: dict[str, Any], target: TargetArchitecture, sizes: Sizes) -> tuple[str, ...]:
    """Compare the rotary positions, which releases of transformers before 5 read from legacy keys.

    Returns:
        The keys that were compared.
    """
    if not sizes.rotary_dim:
        return ()
    nested = config.get("rope_parameters")
    if not isinstance(nested, dict):
        raise Failure(f"{CONFIG} has rope_parameters = {nested!r}, expected an object")
    partial = ("partial_rotary_factor",) if target.out == "phi" else ()
    wanted = {**sizes.scaling, "rope_theta": sizes.theta}
    given = {key: value for key, value in nested.items() if key not in partial}
    if not _same_numbers(given, wanted):
        raise Failure(f"{CONFIG} has rope_parameters = {nested!r}, expected {wanted!r}")
    if not _same_numbers(config.get("rope_theta"), sizes.theta):
        raise Failure(f"{CONFIG} has rope_theta = {config.get('rope_theta')!r}, expected {sizes.theta!r}")
    scaling = sizes.scaling if len(sizes.scaling) > 1 else None
    if "rope_scaling" not in config or not _same_numbers(config["rope_scaling"], scaling):
        raise Failure(f"{CONFIG} has rope_scaling = {config.get('rope_scaling')!r}, expected {scaling!r}")
    for section, factors in (("", config), ("rope_parameters.", nested)):
        factor: Any = factors.get("partial_rotary_factor")
        if partial and (
            type(factor) not in (int, float) or not 0 < factor <= 1 or int(sizes.head_dim * factor) != sizes.rotary_dim
        ):
            raise Failure(
                f"{CONFIG} has {section}partial_rotary_factor = {factor!r}, but {sizes.rotary_dim} of {sizes.head_dim} rows rotate"
            )
    if partial and config["partial_rotary_factor"] != nested["partial_rotary_factor"]:
        raise Failure(f"{CONFIG} states partial_rotary_factor twice, with different values")
    return ("rope_parameters", "rope_theta", "rope_scaling", *partial)


def _same_numbers(a: Any, b: Any) -> bool:
    """Whether two values are equal, where 1 equals 1.0 but not true."""
    if isinstance(a, dict) and isinstance(b, dict):
        return set(a) == set(b) and all(_same_numbers(a[key], b[key]) for key in a)
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    return bool(a == b)
