"""Span corruption: the text can be put together again, and its statistics are T5's."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gqa_convert.data.model_tokenizer import has_sentinels, sentinel_ids
from gqa_convert.data.sampler import IGNORED, SampleSettings
from gqa_convert.data.samples import EvaluationBlocks, Samples
from gqa_convert.data.span_corruption import Shape, SpanCorruption, SpanSampler, shape_for
from gqa_convert.errors import DataError
from tests.helpers.data_helpers import EOS, PAD, array_tokens, span_tokenizer

TOKENIZER = span_tokenizer()
SENTINELS = sentinel_ids(TOKENIZER)
NUMBER_OF = {int(token): number for number, token in enumerate(SENTINELS)}


def put_together(inputs: list[int], targets: list[int]) -> list[int]:
    """The text that a sample was made of."""
    assert inputs[-1] == targets[-1] == EOS
    spans: list[list[int]] = []
    for token in targets[:-1]:
        if token in NUMBER_OF:
            assert NUMBER_OF[token] == len(spans)
            spans.append([])
        else:
            spans[-1].append(token)
    text: list[int] = []
    used = 0
    for token in inputs[:-1]:
        if token in NUMBER_OF:
            assert NUMBER_OF[token] == used
            text += spans[used]
            used += 1
        else:
            text.append(token)
    assert used == len(spans)
    return text


def sampler_for(length: int, tokenizer: Any = TOKENIZER) -> SpanSampler:
    return SpanSampler(SampleSettings(tokenizer, "span_corruption", length, decoder_start=PAD))


def samples_of(words: np.ndarray, length: int, seed: int = 3) -> Samples:
    return Samples([(array_tokens(words), 1.0)], sampler_for(length), seed)


def random_words(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 503, count)


def test_shapes_are_those_of_t5() -> None:
    assert shape_for(512) == Shape(568, 85, 28)
    assert shape_for(1024) == Shape(1137, 171, 57)


@given(count=st.integers(2, 300), seed=st.integers(0, 99))
def test_the_text_can_be_put_together_again(count: int, seed: int) -> None:
    raw = np.random.default_rng(seed).integers(
        0, 503, (3, count)
    )  # the padding token 0 is a token as any other
    raw[raw == EOS] = 5
    batch = SpanCorruption(TOKENIZER, PAD, 64).batch(raw, [(seed, row) for row in range(3)])
    for text, inputs, targets in zip(
        raw.tolist(), batch["input_ids"], batch["labels"], strict=True
    ):
        assert put_together(inputs.tolist(), targets.tolist()) == text
    assert (batch["decoder_input_ids"][:, 0] == PAD).all()
    assert (batch["decoder_input_ids"][:, 1:] == batch["labels"][:, :-1]).all()
    assert not (batch["labels"] == IGNORED).any()


def test_statistics_of_span_corruption() -> None:
    batch = samples_of(random_words(568 * 64), 512).batch(range(64))
    assert batch["input_ids"].shape == (64, 512)
    assert batch["labels"].shape == (64, 114)
    marks = np.isin(batch["labels"], SENTINELS)
    lengths = np.diff(np.flatnonzero(np.concatenate([marks.ravel(), [True]]))) - 1
    assert (marks.sum(axis=1) == 28).all()
    assert abs(lengths.mean() - 85 / 28) < 0.06
    assert lengths.max() > 8
    assert (lengths == 1).mean() > 0.25
    assert batch["labels"][:, 0].tolist() == [SENTINELS[0]] * 64
    assert SENTINELS[0] == SENTINELS[1] + 1  # they descend
    places = np.isin(batch["input_ids"], SENTINELS).mean(axis=0)[:-20]
    halves = np.array_split(places, 2)
    assert abs(halves[0].mean() - halves[1].mean()) < 0.01


def test_an_epoch_uses_no_token_twice() -> None:
    shortest = sampler_for(40).shortest
    size = 5 * shortest + shortest // 2
    samples = samples_of(np.arange(1000, 1000 + size), 40)
    assert samples.sampler.count(samples.sources[0]) == 5
    starts = []
    for epoch in range(2):
        found: list[int] = []
        for index in range(5 * epoch, 5 * epoch + 5):
            batch = samples.batch([index])
            found += put_together(batch["input_ids"][0].tolist(), batch["labels"][0].tolist())
        assert len(found) == len(set(found)) == 5 * shortest
        starts.append(found[0])
    assert starts[0] != starts[1]


@given(indices=st.lists(st.integers(0, 10**6), min_size=1, max_size=8))
def test_samples_do_not_depend_on_how_they_are_asked_for(indices: list[int]) -> None:
    together = samples_of(random_words(4000), 48).batch(indices)
    samples = samples_of(random_words(4000), 48)
    for row, index in reversed(list(enumerate(indices))):
        alone = samples.batch([index])
        assert all((alone[name][0] == rows[row]).all() for name, rows in together.items())


def test_evaluation_uses_whole_blocks_in_order() -> None:
    words = np.arange(1000, 3000)
    sampler = sampler_for(48)
    blocks = EvaluationBlocks([(array_tokens(words), 500)], sampler)
    batch = blocks.batch(range(len(blocks)))
    rows = zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
    found = [token for inputs, targets in rows for token in put_together(inputs, targets)]
    assert found == words[: len(found)].tolist()
    assert 500 - sampler.shortest < len(found) <= 500
    whole = array_tokens(words[: 3 * sampler.length])
    assert len(EvaluationBlocks([(whole, 10**6)], sampler)) == 3


def test_missing_sentinels() -> None:
    assert has_sentinels(TOKENIZER)
    assert not has_sentinels(span_tokenizer(0))
    with pytest.raises(DataError, match="no sentinel tokens"):
        sampler_for(64, tokenizer=span_tokenizer(0))
    with pytest.raises(
        DataError,
        match="needs 28 sentinel tokens, the tokenizer has 10: make sequence_length smaller",
    ):
        sampler_for(512, tokenizer=span_tokenizer(10))
    sampler_for(160, tokenizer=span_tokenizer(10))
