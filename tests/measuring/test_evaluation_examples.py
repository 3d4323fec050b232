"""Windows of a text, and the bytes that its tokens cover."""

import numpy as np
import pytest

from gqa_convert.data.documents import Piece
from gqa_convert.measuring.evaluation.examples import Example, Material, text_material
from tests.helpers.data_helpers import demo_tokenizer

TEXT = "def mean(values):\n    return sum(values) / len(values)  # ein Mittelwert: naïve, 中文, 🙂\n"


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
