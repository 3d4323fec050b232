"""Uptraining turns every dropout of a model off."""

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from gqa_convert.training.models import turn_dropout_off

MODELS = {
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=2, num_heads=4, decoder_start_token_id=0)
    ),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=4)),
    "bart": lambda: BartForConditionalGeneration(
        BartConfig(
            vocab_size=32,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            max_position_embeddings=16,
            attention_dropout=0.1,
            activation_dropout=0.1,
        )
    ),
}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_in_training_mode_computes_what_it_does_in_evaluation(kind: str, implementation: str) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]()
    model.set_attn_implementation(implementation)
    ids = torch.randint(3, 32, (2, 8))
    inputs = {"input_ids": ids} | ({} if kind == "gpt2" else {"decoder_input_ids": ids})
    expected = model.eval()(**inputs).logits
    model.train()
    assert not torch.equal(model(**inputs).logits, expected)
    turn_dropout_off(model)
    assert torch.equal(model(**inputs).logits, expected)
