"""Uptraining turns every dropout of a model off."""

import pytest
import torch

from gqa_convert.training.models import turn_dropout_off
from tests.helpers.own_files import make_source_model

RATES = {
    "t5": ("dropout_rate",),
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "bart": ("dropout", "attention_dropout", "activation_dropout"),
}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", RATES)
def test_a_model_in_training_mode_computes_what_it_does_in_evaluation(kind: str, implementation: str) -> None:
    model = make_source_model(kind, **dict.fromkeys(RATES[kind], 0.1))
    model.set_attn_implementation(implementation)
    ids = torch.randint(3, 32, (2, 8))
    inputs = {"input_ids": ids} | ({} if kind == "gpt2" else {"decoder_input_ids": ids})
    expected = model.eval()(**inputs).logits
    model.train()
    assert not torch.equal(model(**inputs).logits, expected)
    turn_dropout_off(model)
    assert torch.equal(model(**inputs).logits, expected)
