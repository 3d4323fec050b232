"""`attn_implementation="gqa"` against eager attention, for every model type that the package knows:
equal, or refused.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedModel,
    StaticCache,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import gqa_convert.families.modeling
from gqa_convert.attention import register
from gqa_convert.attention.interface import why_unsupported
from gqa_convert.errors import OptionError, UnsupportedAttentionError
from gqa_convert.families.loading import cache_name, encoder_shape
from gqa_convert.families.table import FAMILIES
from tests.helpers.own_files import CASES, SIZES, auto_class
from tests.helpers.selection import slow_but
from tests.helpers.tiny import VOCAB, make_config, randomise

REFUSED = {
    **dict.fromkeys(("bloom", "falcon", "gpt_neo", "mpt"), "has custom attention code"),
    **dict.fromkeys(("gqa_gpt_neo", "gqa_mpt"), "has custom attention code"),
    **dict.fromkeys(("gemma2", "vaultgemma"), "attn_logit_softcapping is 50.0"),
    **dict.fromkeys(("gpt_oss", "granite_swa", "granitemoe_swa", "flint"), "attention sinks"),
    **dict.fromkeys(("falcon, RW", "gqa_falcon, RW"), "ALiBi twice"),
    **dict.fromkeys(("nllb-moe", "gqa_nllb-moe"), "rules out scaled dot-product attention"),
}
"""What is refused and with which words; a variant of a family, "falcon, 7B", as the family is
unless it stands here itself.
"""

TRANSFORMERS_FAILS = {
    "minimax": {"static", "static, padded"},  # has a cache class of its own
    # makes ALiBi from the mask, which must have two dimensions and be as long as the cache
    "gqa_bloom": {"4-D mask", "static, padded"},
}
"""What eager attention of transformers raises errors for."""

LENGTH = 21
ONES = torch.ones(2, LENGTH, dtype=torch.int64)
LEFT, RIGHT = ONES.clone(), ONES.clone()
LEFT[1, :6] = 0
RIGHT[1, -6:] = 0
STEPS = [9, 1, 1, 6, 1, 1, 2]  # the first step reaches beyond the padding on the left
# transformers has no class of chatglm
NAMES = [name for name, family in FAMILIES.items() if family.modeling is None and name != "chatglm"]
NAMES += [
    prefix + name
    for name in CASES
    if name != "speech_to_text"  # its class rules out what NLLB-MoE's does
    for prefix in ("", "gqa_")
]

CHANGED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma, bidirectional": ("gemma", {"use_bidirectional_attention": True}),
    "gemma2, uncapped": ("gemma2", {"attn_logit_softcapping": None}),
    "gemma2, uncapped and bidirectional": (
        "gemma2",
        {"attn_logit_softcapping": None, "use_bidirectional_attention": True},
    ),
    "gemma3, bidirectional": ("gemma3_text", {"use_bidirectional_attention": True}),
    "qwen2, windows": ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}),
    "llama4, small chunks": ("llama4_text", {"attention_chunk_size": 4}),
    "vaultgemma, uncapped": ("vaultgemma", {"attn_logit_softcapping": None}),
}
"""Configs of stock types that differ from the tests' usual ones in a way that touches masks."""
NAMES += CHANGED

USUAL = ("llama", "mistral", "gemma2, uncapped", "t5")
"""What every run compares."""

Case = tuple[str, Callable[[Any], Tensor], Tensor]
"""Its name, what gives logits [2, L, V], and which positions are no padding [2, L]."""


def configured(name: str) -> tuple[Any, str]:
    """A tiny config and its auto class; in the form with a modelling file, 3 K/V heads, and 2 in an
    encoder.
    """
    stock = name.removeprefix("gqa_")
    if name in CHANGED:
        model_type, changes = CHANGED[name]
        return make_config(model_type, kv_heads=3, **changes), "AutoModelForCausalLM"
    if stock not in CASES:
        return make_config(name, kv_heads=3), "AutoModelForCausalLM"
    model_type, changes = CASES[stock]
    values = SIZES[model_type] | changes
    if stock == name:
        return CONFIG_MAPPING[model_type](**values), auto_class(model_type)
    modeling = FAMILIES[model_type].modeling
    assert modeling is not None
    values = {key: value for key, value in values.items() if key != "num_kv_heads"} | {
        "num_key_value_heads": 3
    }
    made = CONFIG_MAPPING[modeling.model_type]
    return made(**values), auto_class(model_type)


def build(name: str, *implementations: str) -> list[Any]:
    """The same random weights under each implementation."""
    gqa_convert.families.modeling.register_modeling()
    register()
    config, auto = configured(name)
    made: list[Any] = []
    for implementation in implementations:
        options: dict[str, Any] = {"attn_implementation": implementation, "dtype": torch.float32}
        model = getattr(transformers, auto).from_config(copy.deepcopy(config), **options).eval()
        assert model.config._attn_implementation == implementation
        if made:
            model.load_state_dict(made[0].state_dict())
        else:
            randomise(model)
        made.append(model)
    return made


def reason(name: str) -> str | None:
    return REFUSED.get(name) or (None if name in CHANGED else REFUSED.get(name.split(",")[0]))


def in_steps(
    model: Any, tokens: Tensor, new_cache: Callable[[Any], Any], mask: Tensor | None
) -> Tensor:
    """Logits of tokens that are given a few at a time."""
    cache, outputs, done = new_cache(model.config), [], 0
    for size in STEPS:
        end = done + size
        options: dict[str, Any] = {} if mask is None else {"attention_mask": mask[:, :end]}
        if mask is not None and "position_ids" in inspect.signature(model.forward).parameters:
            options["position_ids"] = (mask[:, :end].cumsum(1) - 1).clamp(min=0)[:, done:]
        output = model(tokens[:, done:end], use_cache=True, **options, **{cache_name(model): cache})
        cache = getattr(output, cache_name(model), cache)
        outputs.append(output.logits)
        done = end
    return torch.cat(outputs, 1)


def logits_of(**given: Any) -> Callable[[Any], Tensor]:
    """Of one forward pass."""
    return lambda model: model(**given).logits


def causal_cases(config: Any) -> Iterator[Case]:
    tokens = torch.randint(3, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    for name, mask, real in (
        ("no mask", None, ONES),
        ("left", LEFT, LEFT),
        ("right", RIGHT, RIGHT),
    ):
        yield name, logits_of(input_ids=tokens, attention_mask=mask), real
    documents = torch.tensor([[0] * 8 + [1] * 13, [0] * 15 + [1] * 6])
    seen = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    positions = torch.stack(
        [torch.cat([torch.arange(size) for size in sizes]) for sizes in ((8, 13), (15, 6))]
    )
    placed = {"position_ids": positions, "use_cache": False}
    if config.model_type in ("mpt", "bloom", "gqa_bloom"):  # ALiBi has no position_ids
        placed = {}

    def under_4d_mask(model: Any) -> Tensor:
        logits = model(tokens, attention_mask=added, **placed).logits
        if (
            model.config._attn_implementation == "gqa"
        ):  # booleans are the same; eager would add them
            torch.testing.assert_close(
                model(tokens, attention_mask=seen, **placed).logits, logits, rtol=1e-5, atol=1e-5
            )
        return logits  # type: ignore[no-any-return]

    yield "4-D mask", under_4d_mask, ONES
    if placed:
        yield "packed", logits_of(input_ids=tokens, **placed), ONES
    if getattr(config, "add_cross_attention", False):
        states = torch.randn(
            2, LENGTH, config.hidden_size, generator=torch.Generator().manual_seed(4)
        )
        for mask in (LEFT, RIGHT):
            encoded = {"encoder_hidden_states": states, "encoder_attention_mask": mask}
            yield "cross-attention", logits_of(input_ids=tokens, **encoded), ONES
    for mask in (None, LEFT, RIGHT):
        real = ONES if mask is None else mask
        for name, cache in (
            ("dynamic", growing),
            ("static" if mask is None else "static, padded", fixed),
        ):
            yield name, partial(in_steps, tokens=tokens, new_cache=cache, mask=mask), real


def growing(config: Any) -> Any:
    """A dynamic cache; None for a model that must make its own."""
    return None if config.model_type == "minimax" else DynamicCache(config=config)


def fixed(config: Any) -> Any:
    """A static cache."""
    return StaticCache(config=config.get_text_config(decoder=True), max_cache_len=30)


def encoder_decoder_cases(config: Any) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(3)
    source, target = torch.randint(3, VOCAB, (2, 2, LENGTH), generator=generator)
    encoded: dict[str, Any] = {"input_ids": source}
    masks: tuple[Tensor | None, ...] = (None, LEFT, RIGHT)
    other = "pixel_values" if hasattr(config, "encoder") else "input_features"
    if other == "pixel_values" or hasattr(config, "max_source_positions"):
        encoded = {other: torch.randn(2, *encoder_shape(config, 40), generator=generator)}
        masks = (None,)
    for mask in masks:
        given = encoded | {"attention_mask": mask}
        yield "encoder", logits_of(**given, decoder_input_ids=target), ONES
        for own in (growing, fixed):
            yield "cache", partial(decoded_in_steps, given=given, target=target, own=own), ONES
    for mask in (LEFT, RIGHT):
        given = encoded | {"attention_mask": masks[-1], "decoder_attention_mask": mask}
        yield "decoder", logits_of(**given, decoder_input_ids=target), mask


def decoded_in_steps(
    model: Any, given: dict[str, Any], target: Tensor, own: Callable[[Any], Any]
) -> Tensor:
    encoded = {
        "encoder_outputs": model.get_encoder()(**given),
        "attention_mask": given["attention_mask"],
    }
    parts = target.split(STEPS, 1)
    encoded[cache_name(model)] = EncoderDecoderCache(own(model.config), DynamicCache())
    outputs = [model(**encoded, decoder_input_ids=part, use_cache=True) for part in parts]
    return torch.cat([output.logits for output in outputs], 1)


@pytest.mark.parametrize("name", slow_but(USUAL, [name for name in NAMES if not reason(name)]))
@torch.no_grad()
def test_logits_equal_those_of_eager_attention(name: str) -> None:
    eager, ours = build(name, "eager", "gqa")
    compared = {}
    for case, logits, real in (
        encoder_decoder_cases if eager.config.is_encoder_decoder else causal_cases
    )(eager.config):
        if case in TRANSFORMERS_FAILS.get(name.split(",")[0], ()):
            with pytest.raises((ValueError, RuntimeError)):
                logits(eager)
            continue
        compared[case] = logits(eager)
        expected = compared[case][real.bool()]
        scale = max(1.0, expected.abs().max().item())
        difference = (logits(ours)[real.bool()] - expected).abs().max().item()
        assert difference <= 5e-5 * scale, (
            f"{case}: logits differ by {difference} where the largest is {scale}"
        )
    if "no mask" in compared:  # the masks matter to these weights
        assert not torch.allclose(compared["left"][1, 6:], compared["no mask"][1, 6:], atol=1e-2)


@pytest.mark.parametrize("name", [name for name in NAMES if reason(name)])
def test_what_would_differ_is_refused(name: str) -> None:
    """In the first forward pass; some classes of transformers know their own attention functions
    only.
    """
    gqa_convert.families.modeling.register_modeling()
    register()
    config, auto = configured(name)
    tokens = torch.ones(1, 5, dtype=torch.int64, device="meta")
    own = name.split(",")[0] in ("falcon", "gpt_neo", "gqa_gpt_neo")
    with (
        torch.device("meta"),
        pytest.raises((KeyError, ValueError) if own else UnsupportedAttentionError) as caught,
    ):
        getattr(transformers, auto).from_config(config, attn_implementation="gqa").eval()(tokens)
    why = why_unsupported(getattr(transformers, auto)._model_mapping[type(config)], config)
    assert why is not None
    assert reason(name) in why
    if not own:
        assert "\n" not in str(caught.value)
        assert "'gqa' attention would change its results: omit attn_implementation" in str(
            caught.value
        )


def test_a_config_that_differs_from_an_accepted_one_is_checked_too() -> None:
    build("gemma2, uncapped", "gqa")[0](torch.ones(1, 5, dtype=torch.int64))
    with pytest.raises(UnsupportedAttentionError, match=r"attn_logit_softcapping is 50\.0"):
        build("gemma2", "gqa")[0](torch.ones(1, 5, dtype=torch.int64))


def test_transformers_own_classes_are_as_they_were() -> None:
    stock = PreTrainedModel.get_correct_attn_implementation
    register()
    assert PreTrainedModel.get_correct_attn_implementation is stock
    assert stock.__module__ == "transformers.modeling_utils"


def test_a_name_written_into_a_config_is_refused_in_the_first_forward_pass() -> None:
    register()
    model = AutoModelForCausalLM.from_config(BloomConfig(**SIZES["bloom"]))
    model.set_attn_implementation("gqa")
    assert model.config._attn_implementation == "eager"  # transformers warns, and leaves it
    model.config._attn_implementation = "gqa"
    for _ in range(2):
        with pytest.raises(UnsupportedAttentionError, match="BloomModel"):
            model(torch.ones(1, 5, dtype=torch.int64))


@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "gpt_oss", "gpt_neo", "gqa_gpt_neo", "gqa_falcon, 7B"]
)
@torch.no_grad()
def test_a_name_written_by_hand_with_a_mask_of_ones_own(name: str) -> None:
    """It computes what eager attention computes, or is refused; the model makes no mask at which it
    would be checked.
    """
    (model,) = build(name, "eager")
    mask = torch.full((2, 1, 7, 7), torch.finfo(torch.float32).min).triu(1)
    mask[:, :, 5, 2] = torch.finfo(torch.float32).min
    kinds = dict.fromkeys(("full_attention", "sliding_attention"), mask)
    tokens = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))
    inputs: dict[str, Any] = {
        "input_ids": tokens,
        "attention_mask": kinds if name in REFUSED_IN_CALLS else mask,
    }
    expected = model(**inputs).logits
    model.config._attn_implementation = "gqa"
    if name in REFUSED_IN_CALLS:
        with pytest.raises(OptionError, match=REFUSED_IN_CALLS[name]):
            model(**inputs)
    else:
        torch.testing.assert_close(
            model(**inputs).logits, expected, rtol=0, atol=5e-5 * expected.abs().max().item()
        )


REFUSED_IN_CALLS = {"gemma2": "capped scores", "gpt_oss": "attention sinks"}
