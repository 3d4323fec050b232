"""What a translated OUT's config must say, by rules of our own over SOURCE's, in the words of old and new clients."""

from typing import Any

from gqa_convert.verify.config import CONFIG, same_json
from gqa_convert.verify.report import Failure
from gqa_convert.verify.sizes import Sizes, first_of
from gqa_convert.verify.target_architectures import TargetArchitecture

Rule = tuple[str, str, Any]
"""A key of OUT, the keys of SOURCE that say the same, and what SOURCE's class takes where none is there."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ALL: tuple[Rule, ...] = (("initializer_range", "initializer_range", 0.02), ("use_cache", "use_cache", True))

_FROM_NEOX: tuple[Rule, ...] = (
    *_ALL,
    ("hidden_act", "hidden_act", "gelu"),
    ("max_position_embeddings", "max_position_embeddings", 2048),
    ("attention_dropout", "attention_dropout", 0.0),
    ("tie_word_embeddings", "tie_word_embeddings", False),
    ("bos_token_id", "bos_token_id", 0),
    ("eos_token_id", "eos_token_id", 2),
    ("pad_token_id", "pad_token_id", None),
)
_GPT_TOKENS: tuple[Rule, ...] = (
    ("bos_token_id", "bos_token_id", 50256),
    ("eos_token_id", "eos_token_id", 50256),
    ("pad_token_id", "pad_token_id", None),
)

_RULES: dict[tuple[str, str], tuple[Rule, ...]] = {
    ("gpt_neox", "phi"): (
        *_FROM_NEOX,
        ("layer_norm_eps", "layer_norm_eps", 1e-5),
        ("resid_pdrop", "hidden_dropout", 0.0),
        ("embd_pdrop", "hidden_dropout", 0.0),
    ),
    ("gpt_neox", "starcoder2"): (
        *_FROM_NEOX,
        ("norm_epsilon", "layer_norm_eps", 1e-5),
        ("residual_dropout", "hidden_dropout", 0.0),
        ("embedding_dropout", "hidden_dropout", 0.0),
    ),
    ("gptj", "phi"): (
        *_ALL,
        *_GPT_TOKENS,
        ("hidden_act", "activation_function", "gelu_new"),
        ("layer_norm_eps", "layer_norm_epsilon", 1e-5),
        ("max_position_embeddings", "n_positions max_position_embeddings", 2048),
        ("resid_pdrop", "resid_pdrop", 0.0),
        ("embd_pdrop", "embd_pdrop", 0.0),
        ("attention_dropout", "attn_pdrop", 0.0),
        ("tie_word_embeddings", "tie_word_embeddings", False),
    ),
    ("gpt2", "gpt_bigcode"): (
        *_ALL,
        *_GPT_TOKENS,
        ("activation_function", "activation_function", "gelu_new"),
        ("layer_norm_epsilon", "layer_norm_epsilon", 1e-5),
        ("n_positions", "n_positions max_position_embeddings", 1024),
        ("n_inner", "n_inner", None),
        ("resid_pdrop", "resid_pdrop", 0.1),
        ("embd_pdrop", "embd_pdrop", 0.1),
        ("attn_pdrop", "attn_pdrop", 0.1),
        ("tie_word_embeddings", "tie_word_embeddings", True),
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

_OWN_WORDS = _words(
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
"""Keys that one of the types gives a meaning of its own: OUT has them only where its type needs them."""


def check_translated_config(
    config: dict[str, Any], original: dict[str, Any], target_architecture: TargetArchitecture, sizes: Sizes, groups: int
) -> str:
    """OUT's config against what follows from SOURCE's.

    Args:
        config: OUT's.
        original: SOURCE's.
        home: which types they are of.
        sizes: SOURCE's counts.
        groups: K/V heads of OUT.
    """
    expected = _expected(original, target_architecture, sizes, groups)
    positions = _check_positions(config, target_architecture, sizes)
    for key, value in expected.items():
        if key not in config:
            raise Failure(f"{CONFIG} lacks {key}, which should be {value!r}")
        if not same_json(config[key], value):
            raise Failure(f"{CONFIG} has {key} = {config[key]!r} where {value!r} belongs")
    rest = set(config) - set(expected) - set(positions)
    for key in sorted(rest | set(original)):
        if key in rest and (key in _OWN_WORDS or key not in original):
            raise Failure(
                f"{CONFIG} has {key} = {config[key]!r}, which a {target_architecture.out} made from SOURCE has not"
            )
        if key not in config and key not in _OWN_WORDS:
            raise Failure(f"{CONFIG} lacks {key}, which SOURCE has as {original[key]!r}")
        if key in rest and not same_json(config[key], original[key]):
            raise Failure(f"{CONFIG} has {key} = {config[key]!r} where SOURCE has {original[key]!r}")
    return f"a {target_architecture.out}: {len(expected) + len(positions)} values follow from SOURCE's, {len(rest)} are the same ({groups} groups)"


def _expected(
    original: dict[str, Any], target_architecture: TargetArchitecture, sizes: Sizes, groups: int
) -> dict[str, Any]:
    """What OUT must state, but for rotary positions."""
    classes = target_architecture.classes
    stated = original.get("architectures") or list(classes)[:1]
    expected: dict[str, Any] = {
        "model_type": target_architecture.out,
        "architectures": [classes[name] for name in stated],
        "vocab_size": original.get("vocab_size"),
        "num_key_value_heads": groups,
        "multi_query_attention": True,
        "multi_query_group_num": groups,
    }
    if target_architecture.out == "gpt_bigcode":
        expected |= {"n_embd": sizes.hidden, "n_head": sizes.heads, "n_layer": sizes.layers}
    else:
        expected |= {
            "hidden_size": sizes.hidden,
            "num_attention_heads": sizes.heads,
            "num_hidden_layers": sizes.layers,
            "intermediate_size": sizes.inner,
        }
    expected |= _FIXED[target_architecture.out]
    expected |= {
        key: first_of(original, keys, default)
        for key, keys, default in _RULES[target_architecture.source, target_architecture.out]
    }
    dtype = first_of(original, "dtype torch_dtype")
    if dtype is not None:
        expected |= {"dtype": dtype, "torch_dtype": dtype}
    if original.get("tokenizer_class") is None:  # else clients would take the one of OUT's type
        expected["tokenizer_class"] = target_architecture.tokenizer
    return expected


def _check_positions(config: dict[str, Any], target_architecture: TargetArchitecture, sizes: Sizes) -> tuple[str, ...]:
    """Rotary positions, which clients before transformers 5 read from other keys; returns the keys that were looked
    at.
    """
    if not sizes.rotated:
        return ()
    nested = config.get("rope_parameters")
    if not isinstance(nested, dict):
        raise Failure(f"{CONFIG} has rope_parameters = {nested!r} where a base and more belongs")
    partial = ("partial_rotary_factor",) if target_architecture.out == "phi" else ()
    wanted = {**sizes.scaling, "rope_theta": sizes.theta}
    given = {key: value for key, value in nested.items() if key not in partial}
    if not _same_numbers(given, wanted):
        raise Failure(f"{CONFIG} has rope_parameters = {nested!r} where {wanted!r} belongs")
    if not _same_numbers(config.get("rope_theta"), sizes.theta):
        raise Failure(f"{CONFIG} has rope_theta = {config.get('rope_theta')!r} where {sizes.theta!r} belongs")
    scaling = sizes.scaling if len(sizes.scaling) > 1 else None
    if "rope_scaling" not in config or not _same_numbers(config["rope_scaling"], scaling):
        raise Failure(f"{CONFIG} has rope_scaling = {config.get('rope_scaling')!r} where {scaling!r} belongs")
    for place, factors in (("", config), ("rope_parameters.", nested)):
        factor: Any = factors.get("partial_rotary_factor")
        if partial and (
            type(factor) not in (int, float) or not 0 < factor <= 1 or int(sizes.width * factor) != sizes.rotated
        ):
            raise Failure(
                f"{CONFIG} has {place}partial_rotary_factor = {factor!r} where {sizes.rotated} of {sizes.width} rows turn"
            )
    if partial and config["partial_rotary_factor"] != nested["partial_rotary_factor"]:
        raise Failure(f"{CONFIG} has two values of partial_rotary_factor")
    return ("rope_parameters", "rope_theta", "rope_scaling", *partial)


def _same_numbers(a: Any, b: Any) -> bool:
    """Whether two values are one, 1 and 1.0 being the same."""
    if isinstance(a, dict) and isinstance(b, dict):
        return set(a) == set(b) and all(_same_numbers(a[key], b[key]) for key in a)
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    return bool(a == b)
