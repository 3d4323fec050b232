"""Windows of a text, and the bytes that its tokens cover."""

import numpy as np
import pytest

from gqa_convert.data.documents import Piece
from gqa_convert.text.scoring.texts import byte_ends, encode, text_material
from gqa_convert.text.scoring.windows import cut_windows, longest_first
from tests.helpers.data_helpers import demo_tokenizer, span_tokenizer

TEXT = "def mean(values):\n    return sum(values) / len(values)  # ein Mittelwert: naïve, 中文, 🙂\n"


@pytest.mark.parametrize(("context", "stride"), [(5, 5), (5, 3), (5, 1), (1, 1), (100, 40)])
def test_every_token_but_the_first_is_scored_once(context: int, stride: int) -> None:
    documents = [(0, 17), (17, 18), (18, 18), (18, 24), (24, 26)]
    scored: list[int] = []
    for start, length, skip in cut_windows(documents, context, stride):
        assert length <= context
        scored += range(start + skip + 1, start + length + 1)
        assert any(begin <= start and start + length < end for begin, end in documents)
    assert sorted(scored) == [place for begin, end in documents for place in range(begin + 1, end)]


def test_batches_hold_every_window_and_the_longest_first() -> None:
    assert longest_first([3, 9, 1, 9, 4], 2) == [[1, 3], [4, 0], [2]]


def test_bytes_of_tokens_add_up_to_the_text() -> None:
    tokenizer = demo_tokenizer()
    _, ends = encode(tokenizer, TEXT)
    assert np.array_equal(byte_ends(TEXT, ends), [len(TEXT[:end].encode()) for end in ends])
    assert ends[-1] == len(TEXT)
    _, ends = encode(span_tokenizer(), "w1 w2  ")  # which has no token for the spaces
    assert ends.tolist() == [2, 7]
    pieces = [Piece("é" * 3000, last=False), Piece(TEXT * 40), Piece("x" * 9)]
    made = text_material(pieces, tokenizer, context=16, stride=16, batch=2)
    assert made.byte_count == sum(len(piece.text.encode()) for piece in pieces)
    blocks = made.by_block(made.sizes)  # type: ignore[arg-type]
    assert blocks.sum() == made.byte_count
    assert len(blocks) == made.block_count == -(-(6000 + len((TEXT * 40).encode())) // 2048) + 1
    assert all(abs(size - 2048) < 20 for size in blocks[:-2])
