"""Streams: tokenised as far as a run needs them, and further when a longer one does."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest

from gqa_convert.data import hub, sampler, sources, token_files
from gqa_convert.data.hub import HubDataset
from gqa_convert.data.samples import Samples
from gqa_convert.errors import DataError
from tests.helpers.data_helpers import evaluation_blocks, open_samples, span_tokenizer

TOKENIZER = span_tokenizer()
DOCUMENTS = 4000
LENGTH = 16


def text_of(number: int) -> str:
    return " ".join(f"w{(number * 7 + place) % 500}" for place in range(1 + number % 5))


class Rows:
    """A dataset of texts; what is read of it is counted."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.read, self.fails_at, self.opened = 0, fails_at, 0

    def __call__(self, _: HubDataset) -> Any:
        self.opened += 1
        return self

    def __iter__(self) -> Iterator[dict[str, str]]:
        for number in range(DOCUMENTS):
            if number == self.fails_at:
                raise ConnectionError("the line went dead")
            self.read += 1
            yield {"text": text_of(number)}


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 50 documents, which are read in order, and no questions to the Hub."""
    monkeypatch.setattr(sampler, "SHUFFLE_WINDOW", 1)
    monkeypatch.setattr(sources, "commit_of", lambda *_, **__: "0" * 40)
    monkeypatch.setattr(token_files, "_BATCH_PIECES", 50)


@pytest.fixture
def from_rows(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Replaces what the Hub would send."""
    return lambda rows: monkeypatch.setattr(HubDataset, "open_rows", lambda dataset: rows(dataset))


def opened(cache: Path, tokens: int | None, **settings: Any) -> Samples:
    given = {"objective": "causal", "sequence_length": LENGTH, "seed": 3}
    return open_samples("org/some", TOKENIZER, tokens=tokens, cache=cache, **given | settings)


def expected_tokens() -> list[int]:
    return [
        token
        for number in range(DOCUMENTS)
        for token in (
            *TOKENIZER(text_of(number), add_special_tokens=False)["input_ids"],
            TOKENIZER.eos_token_id,
        )
    ]


def test_a_stream_is_read_as_far_as_it_is_needed(
    tmp_path: Path, from_rows: Callable[[Any], None]
) -> None:
    rows = Rows()
    from_rows(rows)
    samples = opened(tmp_path, 10 * LENGTH)
    assert not samples.sources[0].complete
    first = samples.batch(range(10))["input_ids"]
    assert first.ravel().tolist() == expected_tokens()[: 10 * LENGTH]
    assert rows.read <= 50 + 50
    with pytest.raises(
        IndexError, match="sample 300 of org/some is cut from tokens that are not there yet"
    ):
        samples.batch([300])
    longer = opened(tmp_path, 300 * LENGTH)
    assert rows.opened == 2
    assert longer.fingerprint == samples.fingerprint
    assert (
        longer.batch(range(300))["input_ids"].ravel().tolist() == expected_tokens()[: 300 * LENGTH]
    )
    assert opened(tmp_path, 200 * LENGTH).batch([0])["input_ids"].tolist() == first[:1].tolist()
    assert rows.opened == 2


@pytest.mark.parametrize("objective", ["causal", "span_corruption"])
def test_evaluation_reads_the_beginning(
    tmp_path: Path, from_rows: Callable[[Any], None], objective: str
) -> None:
    rows = Rows()
    from_rows(rows)
    blocks = evaluation_blocks(
        "org/some", TOKENIZER, objective=objective, sequence_length=32, tokens=1000, cache=tmp_path
    )
    batch = blocks.batch(range(len(blocks)))
    if objective == "causal":
        assert batch["labels"][batch["labels"] >= 0].tolist() == expected_tokens()[1:1000]
    assert batch["input_ids"].shape == (len(blocks), 32)
    assert rows.read < 500


def test_datasets_streams_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "some.jsonl"
    rows = ({"text": text_of(number), "other": number} for number in range(DOCUMENTS))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    load, calls = datasets.load_dataset, []

    def local(dataset: str, **settings: Any) -> Any:
        calls.append((dataset, settings))
        hub_cache = str(tmp_path / "hub")
        return load(
            "json",
            data_files=str(path),
            split=settings["split"],
            streaming=True,
            cache_dir=hub_cache,
        )

    monkeypatch.setattr(datasets, "load_dataset", local)
    for tokens in (100, 700):
        samples = opened(tmp_path / "cache", tokens * LENGTH)
        found = samples.batch(range(tokens))["input_ids"].ravel().tolist()
        assert found == expected_tokens()[: tokens * LENGTH]
    assert calls[0] == (
        "org/some",
        {"name": None, "split": "train", "revision": "0" * 40, "streaming": True},
    )
    other = [{"source": "org/some", "text_field": "content"}]
    with pytest.raises(DataError, match="org/some row 1 has no 'content', found text, other"):
        open_samples(
            other, TOKENIZER, objective="causal", sequence_length=LENGTH, cache=tmp_path / "cache"
        )


def test_commits_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    class Answer:
        sha = "a" * 40

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: Answer)
    assert hub.commit_of("org/some", "b" * 40) == "b" * 40
    assert hub.commit_of("org/some", None) == "a" * 40

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    with pytest.raises(
        DataError,
        match=r"the Hub could not be reached to look for a dataset of this name "
        r"\(ConnectionError: no route to host\)",
    ):
        hub.commit_of("org/some", None)
