"""Windows of a text, batches of them, and scores of tokens, whose logits are made a few rows at a time."""

import numpy as np
import pytest
import torch

from gqa_convert.data.documents import Piece
from gqa_convert.measuring.evaluation import forward
from gqa_convert.measuring.evaluation.examples import Example, Material, text_material
from gqa_convert.measuring.evaluation.forward import Scored, score
from tests.helpers.data_helpers import demo_tokenizer
from tests.helpers.largest import LargestWith
from tests.helpers.tiny import VOCAB, make_config, make_model

TEXT = "def mean(values):\n    return sum(values) / len(values)  # ein Mittelwert: naïve, 中文, 🙂\n"
IDS = np.random.default_rng(0).integers(3, VOCAB, 100)


def material() -> Material:
    """Windows of which only a part is scored."""
    starts = range(0, 99, 20)
    examples = []
    for start in starts:
        targets = IDS[start + 12 : start + 33]
        examples.append(Example(IDS[start : start + 32][: 99 - start], targets, np.zeros_like(targets)))
    return Material(examples, 1)


def test_logits_are_made_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(make_config("gemma2", final_logit_softcapping=2.0))
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


@pytest.mark.parametrize("window", [5, 1, 100])
def test_every_token_but_the_first_of_a_document_is_scored_once(window: int) -> None:
    tokenizer = demo_tokenizer()
    tokenizer.bos_token = None
    pieces = [Piece(TEXT), Piece("x"), Piece("def", last=False), Piece(TEXT)]
    made = text_material(pieces, tokenizer, window=window)
    documents = [tokenizer(text)["input_ids"] for text in (TEXT, "x")]
    documents.append(tokenizer("def")["input_ids"] + tokenizer(TEXT)["input_ids"])
    targets = [token for example in sorted(made.examples, key=lambda each: each.blocks[0]) for token in example.targets]
    assert targets == [token for document in documents for token in document[1:]]
    assert len(made.blocks) == len(targets)
    for example in made.examples:
        assert len(example.read) == len(example.targets) <= window
        assert example.read[1:].tolist() == example.targets[:-1].tolist()
    lengths = [len(example.read) for example in made.examples]
    assert lengths == sorted(lengths, reverse=True)


def test_batches_are_padded_and_know_what_is_scored() -> None:
    examples = [Example(np.arange(1, count + 1), np.array([100 * count]), np.zeros(1)) for count in (4, 3)]
    (batch,) = Material(examples, 1).batches(2)
    assert batch.inputs["input_ids"].tolist() == [[1, 2, 3, 4], [1, 2, 3, 0]]
    assert (batch.rows.tolist(), batch.targets.tolist()) == ([3, 6], [400, 300])
