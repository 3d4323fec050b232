"""Output layers that are taken out of models make the same logits, a few rows at a time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from gqa_convert.losses.output_layer import (
    remove_output_layer,
    removed_output_layer,
    without_output_layer,
)
from tests.helpers.tiny import VOCAB, make_config, make_model

PROJECTED = ("llama", "gemma", "gpt_neox", "phi")
CAPPED_OR_SCALED = ("gemma2", "gemma3_text", "gemma3n_text", "cohere", "granite")
"""The config of `gemma3n_text` accepts no other cap than a number."""


def tokens(rows: int = 2, length: int = 30) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(0))


def tiny(model_type: str) -> Any:
    changed = {
        "granite": {"logits_scaling": 3.0},
        "cohere": {"logit_scale": 0.3},
        "gemma2": {"final_logit_softcapping": 2.0},
        "gemma3_text": {"final_logit_softcapping": 2.0},
        "gemma3n_text": {"final_logit_softcapping": 2.0},
    }
    return make_model(make_config(model_type, **changed.get(model_type, {})))


@pytest.mark.parametrize("model_type", [*PROJECTED, *CAPPED_OR_SCALED])
def test_a_removed_layer_makes_the_logits_of_the_model(model_type: str) -> None:
    model, ids = tiny(model_type), tokens()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    config = model.config.to_dict()
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        with without_output_layer(model, {"input_ids": ids}) as layer:
            assert layer is not None
            assert layer.cap == (
                2.0 if model_type.startswith("gemma") and model_type != "gemma" else None
            )
            states = model(input_ids=ids).logits
            assert states.shape == (*ids.shape, layer.weight.shape[1])
            torch.testing.assert_close(layer.logits(states), wanted, rtol=1e-5, atol=1e-6)
        assert removed_output_layer(model) is None
        assert torch.equal(model(input_ids=ids).logits, wanted)
    assert before == {name: id(parameter) for name, parameter in model.named_parameters()}
    assert model.config.to_dict() == config
    assert not model.training


def test_encoder_decoders() -> None:
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=32,
            d_kv=12,
            d_ff=24,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
        )
    )
    inputs = {"input_ids": tokens(), "decoder_input_ids": tokens(length=7)}
    with torch.no_grad():
        wanted = model(**inputs).logits
        with without_output_layer(model, inputs) as layer:
            assert layer is not None
            torch.testing.assert_close(layer.logits(model(**inputs).logits), wanted)
    assert model.training  # as before


class Odd(LlamaForCausalLM):  # type: ignore[misc]
    """Does with its logits what no stock class here does."""

    def __init__(self, config: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(config)
        self._change = change

    def forward(self, **inputs: Any) -> Any:
        found = super().forward(**inputs)
        found.logits = self._change(found.logits)
        return found


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits + torch.arange(VOCAB),
        lambda logits: logits + 0.1,
        lambda logits: logits.clamp(-50, 50),
        lambda logits: 30 * torch.tanh(logits / 30),
        lambda logits: logits[:, -1:],
        lambda logits: logits.masked_fill(torch.arange(VOCAB) > 60, -100.0),
    ],
    ids=["bias", "shift", "clamp", "cap", "last", "mask"],
)
def test_a_model_that_does_more_keeps_its_layer(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    torch.manual_seed(0)
    model = Odd(make_config("llama"), change).train()
    with torch.no_grad():
        wanted = model(input_ids=tokens()).logits
        with without_output_layer(model, {"input_ids": tokens()}) as layer:
            assert layer is None
            assert torch.equal(model(input_ids=tokens()).logits, wanted)
    assert type(model.lm_head) is torch.nn.Linear
    assert model.training


@pytest.mark.parametrize(("factor", "removed"), [(1.0, True), (0.3, False)])
def test_a_bias_that_the_model_multiplies_too_is_left_to_it(factor: float, removed: bool) -> None:
    model = Odd(make_config("llama"), lambda logits: factor * logits)
    model.lm_head = torch.nn.Linear(model.config.hidden_size, VOCAB)
    with torch.no_grad():
        wanted = model(input_ids=tokens()).logits
        with without_output_layer(model, {"input_ids": tokens()}) as layer:
            assert (layer is not None) == removed
            found = model(input_ids=tokens()).logits
            torch.testing.assert_close(found if layer is None else layer.logits(found), wanted)


def test_a_layer_of_another_class_stays() -> None:
    class Own(torch.nn.Linear):  # type: ignore[misc]
        pass

    model = tiny("llama")
    model.lm_head.__class__ = Own
    assert not remove_output_layer(model, {"input_ids": tokens()})
    assert type(model.lm_head) is Own
