"""The attention of the gradient stages computes what transformers' own does, up to twice the roundings of bfloat16."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch

from gqa_convert.attention import causal_training
from gqa_convert.conversion.fit import training_attention as attention
from tests.helpers.tiny import VOCAB, make_config, make_model

BFLOAT16 = partial(torch.autocast, "cpu", torch.bfloat16)


@pytest.mark.parametrize("model_type", ["llama", "gpt_neox", "gemma", "gpt2"])
@pytest.mark.parametrize("padded", [False, True])
def test_gradients_are_those_of_the_model(model_type: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"n_embd": 96, "n_layer": 2, "n_head": 12} if model_type == "gpt2" else {}
    model = make_model(make_config(model_type, **sizes))
    ids = torch.randint(3, VOCAB, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :5] = 0
    monkeypatch.setattr(causal_training, "LENGTHS", range(2, 2049))
    calls: list[int] = []
    plain = attention.causal_attention
    monkeypatch.setattr(attention, "causal_attention", lambda *given: calls.append(1) or plain(*given))

    def gradients(context: AbstractContextManager[None]) -> dict[str, torch.Tensor]:
        model.zero_grad()
        with context:
            logits = model(input_ids=ids, attention_mask=mask).logits
        logits.float()[mask.bool()].logsumexp(-1).mean().backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    exact, rounded = gradients(nullcontext()), gradients(BFLOAT16())
    assert not calls
    with attention.TrainingAttention():
        found = gradients(BFLOAT16())
    assert bool(calls) is not padded
    for name, gradient in exact.items():
        if gradient.norm() > 1e-3:
            assert (found[name] - gradient).norm() < 2 * (rounded[name] - gradient).norm(), name


def test_other_stages_keep_their_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, and without gradients."""
    monkeypatch.setattr(attention, "causal_attention", None)
    tensors = [torch.zeros(1, 2, 300, 8, requires_grad=True)] * 3
    with attention.TrainingAttention():
        torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)
        with BFLOAT16(), torch.no_grad():
            torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)
        with BFLOAT16(), pytest.raises(TypeError):
            torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)
