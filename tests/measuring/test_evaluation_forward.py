"""Scores of tokens, whose logits are made a few rows at a time."""

import numpy as np
import pytest
import torch

from gqa_convert.measuring.evaluation import forward
from gqa_convert.measuring.evaluation.examples import Example, Material
from gqa_convert.measuring.evaluation.forward import Scored, score
from tests.helpers.largest import LargestWith
from tests.helpers.tiny import VOCAB, make_config, make_model

IDS = np.random.default_rng(0).integers(3, VOCAB, 100)


def material() -> Material:
    """Windows of which only a part is scored."""
    starts = range(0, 99, 20)
    examples = []
    for start in starts:
        targets = IDS[start + 12 : start + 33]
        examples.append(Example(IDS[start : start + 32][: 99 - start], targets, np.zeros_like(targets)))
    return Material(examples, 1)


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_logits_are_made_of_few_rows(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(make_config(model_type, final_logit_softcapping=2.0)) if model_type == "gemma2" else None
    model = model or make_model(make_config(model_type))
    monkeypatch.setattr(forward, "_ROWS", 5)
    with LargestWith(VOCAB, model.config.hidden_size) as largest:
        score(Scored(model, material()), 2)
    assert largest.rows == 5


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
@pytest.mark.parametrize("referenced", [False, True])
def test_scores_do_not_depend_on_the_number_of_rows(
    model_type: str, referenced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reference = (make_model(make_config(model_type), seed=seed) for seed in (1, 2))
    found = []
    for size in (5, 1000):
        monkeypatch.setattr(forward, "_ROWS", size)
        other = Scored(reference, material()) if referenced else None
        found.append(score(Scored(model, material()), 2, reference=other))
    for few, many in zip(*found, strict=True):
        assert (few is None) == (many is None)
        if few is not None:
            np.testing.assert_allclose(few, many, rtol=1e-4, atol=1e-5)
    with torch.inference_mode():
        logits, theirs = (
            each(input_ids=torch.from_numpy(IDS[None, :32])).logits[0, 11:] for each in (model, reference)
        )
    targets = torch.from_numpy(IDS[12:33])
    wanted = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    np.testing.assert_allclose(found[0].loss[:21], wanted.numpy(), rtol=1e-4, atol=1e-5)
    if referenced:
        p = theirs.softmax(-1)
        kl = (p * (p.log() - logits.log_softmax(-1))).sum(-1)
        np.testing.assert_allclose(found[0].kl[:21], kl.numpy(), rtol=1e-4, atol=1e-5)
        assert found[0].agrees[:21].tolist() == (logits.argmax(-1) == theirs.argmax(-1)).float().tolist()
