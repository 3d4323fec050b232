"""Text infilling: the text can be put together again, and masked share and span lengths are the paper's."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gqa_convert.errors import DataError
from gqa_convert.text.collating import DecoderInput, collated
from gqa_convert.text.framing import Frame
from gqa_convert.text.infilling import FramedTokens, InfillingSampler, infilled, keys_needed, noise_tokens, span_lengths
from gqa_convert.text.labels import IGNORED
from gqa_convert.text.samples import EvaluationBlocks, Samples, open_samples
from tests.helpers.data_helpers import ArrayTokens
from tests.helpers.seq2seq import BOS, EOS, MASK, PAD, bart_tokenizer

FRAMES = Frame([BOS], [EOS]), Frame([BOS], [EOS])
DECODER = DecoderInput(EOS, PAD)


def fitting(inputs: list[int], text: list[int]) -> bool:
    """Whether a text fits the tokens that are left, in order, with anything in the place of a mask and nothing
    elsewhere.

    The tokens of the text are all different, so that each has one place.
    """
    if not inputs:
        return not text
    parts: list[list[int]] = [[]]
    for token in inputs:
        if token == MASK:
            parts.append([])
        else:
            parts[-1].append(token)
    if text[: len(parts[0])] != parts[0]:
        return False
    at = len(parts[0])
    for part in parts[1:]:
        if part:
            if part[0] not in text[at:]:
                return False
            at = text.index(part[0], at)
            if text[at : at + len(part)] != part:
                return False
            at += len(part)
    return at == len(text) or inputs[-1] == MASK


def corrupted(raw: np.ndarray, seed: int) -> np.ndarray:
    return infilled(raw, np.random.Philox(seed).random_raw(keys_needed(len(raw))), MASK)


@given(size=st.integers(2, 300), seed=st.integers(0, 999))
def test_the_text_fits_what_is_left_of_it(size: int, seed: int) -> None:
    raw = np.arange(100, 100 + size)
    found = corrupted(raw, seed).tolist()
    assert fitting(found, raw.tolist())
    assert len([token for token in found if token != MASK]) == size - noise_tokens(size)
    assert all((one, other) != (MASK, MASK) for one, other in itertools.pairwise(found))  # no two spans are one
    assert not fitting(found, [*raw.tolist()[:-2], 7, 8]) or found[-1] == MASK


def spans_of(found: list[int], raw: list[int]) -> list[int]:
    """The lengths of the spans behind the masks."""
    places = [raw.index(token) for token in found if token != MASK]
    lengths, kept = [], -1
    left = iter([*places, len(raw)])
    following = next(left)
    for token in found:
        if token == MASK:
            lengths.append(following - kept - 1)
        else:
            kept, following = following, next(left)
    return lengths


def test_statistics_are_the_papers() -> None:
    """30% of the tokens in spans of Poisson(3), those of length 0 included, at places that are all alike."""
    size, rounds = 500, 400
    raw = np.arange(100, 100 + size)
    lengths: list[int] = []
    masked = np.zeros(size)
    for seed in range(rounds):
        found = corrupted(raw, seed).tolist()
        some = spans_of(found, raw.tolist())
        assert sum(some) == 150 == size * 3 // 10
        lengths += some
        masked += ~np.isin(raw, found)
    counts = np.bincount(lengths, minlength=12)
    expected = len(lengths) * np.array([math.exp(-3) * 3**k / math.factorial(k) for k in range(12)])
    assert abs(np.mean(lengths) - 3) < 0.06  # the last of each block is cut to fit
    assert (abs(counts[:8] - expected[:8]) < 5 * np.sqrt(expected[:8]) + 0.01 * len(lengths)).all()
    assert counts[0] > 0.8 * expected[0] > 0
    share = masked / rounds
    assert abs(share.mean() - 0.3) < 1e-9
    assert abs(share[:100].mean() - share[-100:].mean()) < 0.03
    assert (
        0.08 < share[0] < 0.2
    )  # 50 spans in 351 gaps: the very first and last tokens are taken out where a span of some length is there
    assert 0.08 < share[-1] < 0.2


def test_lengths_are_cut_to_the_sum_and_zeros_left_out_where_they_do_not_fit() -> None:
    keys = np.array(
        [0, 1 << 63, 0, 1 << 63, 1 << 63], np.uint64
    )  # Poisson(3) has 0 at 0 and its median 3 in the middle
    assert span_lengths(5, 9, keys).tolist() == [0, 3, 0, 2]
    assert span_lengths(5, 3, keys).tolist() == [3, 2]
    assert span_lengths(50, 9, keys).tolist() == [0, 3, 0, 3, 44]


def samples(seed: int = 3, length: int = 48) -> Samples:
    tokens = FramedTokens(ArrayTokens(np.random.default_rng(0).integers(5, 45, 4000)), FRAMES)
    return Samples([(tokens, 1.0)], InfillingSampler(length, 2, MASK, DECODER), seed, "")


def test_samples_are_framed_and_the_decoder_writes_the_whole_block() -> None:
    made = samples()
    assert made.tokens_per_sample == 46
    batch = made.batch(range(40))
    assert batch["labels"].shape == (40, 48)
    assert (batch["labels"][:, [0, -1]] == [BOS, EOS]).all()
    assert (batch["decoder_input_ids"][:, 0] == EOS).all()
    assert (batch["decoder_input_ids"][:, 1:] == batch["labels"][:, :-1]).all()
    mask = batch["attention_mask"]
    for row, seen, label in zip(batch["input_ids"], mask, batch["labels"], strict=True):
        size = int(seen.sum())
        assert seen[:size].all()
        assert (row[size:] == PAD).all()
        assert (row[0], row[size - 1]) == (BOS, EOS)
        kept = [token for token in row[1 : size - 1] if token != MASK]
        remaining = iter(label[1:-1].tolist())
        assert all(token in remaining for token in kept)  # a subsequence
        assert len(kept) == 46 - 14


@given(indices=st.lists(st.integers(0, 10**6), min_size=1, max_size=6))
def test_samples_do_not_depend_on_how_they_are_asked_for(indices: list[int]) -> None:
    together = samples().batch(indices)
    for row, index in reversed(list(enumerate(indices))):
        for name, rows in samples().batch([index]).items():
            if name != "attention_mask":
                assert (together[name][row, : rows.shape[1]] == rows[0]).all()
    assert any((samples(4).batch([n])["labels"] != samples().batch([n])["labels"]).any() for n in range(3))


def test_evaluation_uses_whole_blocks_in_order() -> None:
    tokens = FramedTokens(ArrayTokens(np.arange(1000, 1500)), FRAMES)
    blocks = EvaluationBlocks([(tokens, 1.0)], InfillingSampler(48, 2, MASK, DECODER), 200, "")
    assert blocks.batch(range(len(blocks)))["labels"][:, 1:-1].ravel().tolist() == list(range(1000, 1000 + 4 * 46))


def test_collated() -> None:
    sources, targets = [np.array([7, 8, 9]), np.array([7])], [np.array([5]), np.array([5, 6])]
    batch = collated(sources, targets, DecoderInput(2, 1))
    assert batch["input_ids"].tolist() == [[7, 8, 9], [7, 1, 1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[5, IGNORED], [5, 6]]
    assert batch["decoder_input_ids"].tolist() == [[2, 1], [2, 5]]
    assert collated(sources, targets, DecoderInput(2, 1, last_first=True))["decoder_input_ids"].tolist() == [
        [5, 1],
        [6, 5],
    ]
    assert "attention_mask" not in collated(sources[:1], targets[:1], DecoderInput(2, 1))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"tokenizer": bart_tokenizer(mask=False)},
            "no mask token, which text_infilling needs: use the objective pairs",
        ),
        (
            {"sequence_length": 3},
            "sequence_length is 3, and the tokenizer puts 2 tokens around each text: make it larger",
        ),
        ({"document_mask": True}, "document_mask needs the objective causal"),
        (
            {"sources": [{"source": "x", "source_language": "en"}]},
            "the tokenizer does not mark languages, and the data source names 'en'",
        ),
    ],
)
def test_what_does_not_fit(keys: dict[str, Any], message: str, tmp_path: Any) -> None:
    given = {
        "sources": "x",
        "tokenizer": bart_tokenizer(),
        "objective": "text_infilling",
        "sequence_length": 20,
        "cache": tmp_path,
    } | keys
    with pytest.raises(DataError, match=message):
        open_samples(given.pop("sources"), given.pop("tokenizer"), **given)
