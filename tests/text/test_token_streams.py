"""Streams: tokens that come while others are read."""

import errno
import fcntl
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import numpy as np
import pytest

from gqa_convert.errors import DataError
from gqa_convert.text import hub_rows, sources
from gqa_convert.text import token_streams as streams
from gqa_convert.text.hub_rows import HubText
from gqa_convert.text.samples import Samples, evaluation_blocks, open_samples
from tests.helpers.data_helpers import span_tokenizer

TOKENIZER = span_tokenizer()
DOCUMENTS = 4000
LENGTH = 16


def text_of(number: int) -> str:
    return " ".join(f"w{(number * 7 + place) % 500}" for place in range(1 + number % 5))


class Rows:
    """A dataset of texts; what is read of it is counted."""

    def __init__(self, fails_at: int | None = None, pause: float = 0.0) -> None:
        self.read, self.fails_at, self.pause, self.opened = 0, fails_at, pause, 0

    def __call__(self, _: HubText) -> Any:
        self.opened += 1
        return self

    def __iter__(self) -> Iterator[dict[str, str]]:
        for number in range(DOCUMENTS):
            if number == self.fails_at:
                self.fails_at = None
                raise ConnectionError("the line went dead")
            self.read += 1
            time.sleep(self.pause)
            yield {"text": text_of(number)}


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 50 documents, little read-ahead, and no questions to the Hub."""
    monkeypatch.setattr(sources, "commit_of", lambda *_, **__: "0" * 40)
    monkeypatch.setattr(streams, "_AHEAD", 400)
    monkeypatch.setattr(streams, "_POLL", 0.002)
    monkeypatch.setattr("gqa_convert.text.tokenizing._BATCH_PIECES", 50)


@pytest.fixture
def from_rows(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Replaces what the Hub would send."""
    return lambda rows: monkeypatch.setattr(HubText, "rows", lambda text: rows(text))


def opened(cache: Path, **settings: Any) -> Samples:
    return open_samples(
        "org/some",
        TOKENIZER,
        **{
            "objective": "causal",
            "sequence_length": LENGTH,
            "seed": 3,
            "cache": cache,
            "shuffle_window": 1,  # a window of a single sample keeps the order of the stream
            **settings,
        },
    )


def expected_tokens() -> list[int]:
    return [
        token
        for number in range(DOCUMENTS)
        for token in (*TOKENIZER(text_of(number), add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id)
    ]


def test_a_stream_is_read_as_far_as_it_is_needed(tmp_path: Path, from_rows: Callable[[Any], None]) -> None:
    rows = Rows()
    from_rows(rows)
    samples = opened(tmp_path)
    assert samples.epoch_samples is None
    first = samples.batch(range(10))["input_ids"]
    assert first.ravel().tolist() == expected_tokens()[: 10 * LENGTH]
    time.sleep(0.3)
    assert rows.read < 500
    samples.batch([300])
    assert rows.read < 2500
    samples.close()
    assert samples.batch([0])["input_ids"].tolist() == first[:1].tolist()


@pytest.mark.parametrize("window", [1, 100 * LENGTH, 10**6])
def test_every_token_of_a_stream_is_predicted_once(
    tmp_path: Path, from_rows: Callable[[Any], None], window: int
) -> None:
    from_rows(Rows())
    samples, tokens = opened(tmp_path, shuffle_window=window), expected_tokens()
    blocks = -(-len(tokens) // LENGTH)
    labels = np.concatenate([samples.batch([index])["labels"][0] for index in range(blocks)])
    found = labels[labels >= 0].tolist()
    assert sorted(found) == sorted(tokens[1:])
    assert (found == tokens[1:]) == (window == 1)
    second = np.concatenate([samples.batch([index])["labels"][0] for index in range(blocks, 2 * blocks)])
    assert samples.epoch_samples == blocks
    assert sorted(second[second >= 0].tolist()) == sorted(tokens[1:])
    assert second.tolist() != labels.tolist()
    samples.close()


def test_a_step_on_a_stream_holds_text_from_the_whole_window(tmp_path: Path, from_rows: Callable[[Any], None]) -> None:
    """As a step on a file does; 16 consecutive blocks would be 64 consecutive documents."""
    from_rows(Rows())
    samples = opened(tmp_path, shuffle_window=100 * LENGTH)
    places = positions(samples.batch(range(16))["input_ids"])
    assert len(set(np.diff(np.sort(places)))) > 4
    assert 60 < max(places) - min(places) < 100
    samples.close()


def positions(blocks: Any) -> list[int]:
    """The numbers of blocks in the order of the stream, whose text repeats after 125 blocks."""
    tokens = expected_tokens()[: 120 * LENGTH]
    numbers = {tuple(tokens[at : at + LENGTH]): at // LENGTH for at in range(0, len(tokens), LENGTH)}
    return [numbers[tuple(block)] for block in blocks.tolist()]


@pytest.mark.parametrize("objective", ["causal", "span_corruption"])
def test_shuffled_samples_do_not_depend_on_how_much_of_the_stream_is_known(
    tmp_path: Path, from_rows: Callable[[Any], None], objective: str
) -> None:
    """A resumed run may find the whole stream on disk, and must read what it would have read."""
    from_rows(Rows())
    settings: dict[str, Any] = {"objective": objective, "sequence_length": 32, "shuffle_window": 1500}
    samples = opened(tmp_path, **settings)
    count = 30
    early = [samples.batch([number])["labels"].tolist() for number in range(count)]
    assert samples.epoch_samples is None
    samples.batch([10**6])
    assert samples.epoch_samples is not None
    assert [samples.batch([number])["labels"].tolist() for number in range(count)] == early
    samples.close()
    again = opened(tmp_path, **settings)
    assert [again.batch([number])["labels"].tolist() for number in range(count)] == early
    again.close()
    other = opened(tmp_path, **settings, seed=4)
    assert [other.batch([number])["labels"].tolist() for number in range(count)] != early
    other.close()


def test_a_run_goes_on_where_the_last_one_stopped(tmp_path: Path, from_rows: Callable[[Any], None]) -> None:
    first = Rows()
    from_rows(first)
    samples = opened(tmp_path)
    expected = samples.batch(range(100))
    samples.close()
    (growing,) = tmp_path.glob("*.growing")
    with growing.open("ab") as file:
        file.write(b"half a batch that no commit knows")
    from_rows(Rows())
    again = opened(tmp_path)
    assert (again.batch(range(100))["labels"] == expected["labels"]).all()
    assert again.batch(range(600))["input_ids"].ravel().tolist() == expected_tokens()[: 600 * LENGTH]
    again.close()


def test_a_finished_stream_is_not_opened_again(tmp_path: Path, from_rows: Callable[[Any], None]) -> None:
    from_rows(Rows())
    samples = opened(tmp_path)
    expected = samples.batch([10**6])
    samples.close()
    rows = Rows()
    from_rows(rows)
    again = opened(tmp_path)
    assert (again.batch([10**6])["labels"] == expected["labels"]).all()
    assert rows.opened == 0


@pytest.mark.parametrize("damage", ["commit", "tokens", "nonsense"])
def test_damaged_files_are_begun_again(tmp_path: Path, from_rows: Callable[[Any], None], damage: str) -> None:
    from_rows(Rows())
    samples = opened(tmp_path)
    expected = samples.batch(range(50))
    samples.close()
    (commit,), (growing,) = tmp_path.glob("*.json"), tmp_path.glob("*.growing")
    if damage == "tokens":
        growing.write_bytes(growing.read_bytes()[:100])
    else:
        said = json.loads(commit.read_text())
        said["commit"][0] -= 1
        commit.write_text("{" if damage == "nonsense" else json.dumps(said))
    again = opened(tmp_path)
    assert (again.batch(range(50))["labels"] == expected["labels"]).all()
    again.close()


def test_a_stream_that_breaks_is_opened_again(
    tmp_path: Path, from_rows: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Event, "wait", lambda event, timeout=None: event.is_set())
    rows = Rows(fails_at=777)
    from_rows(rows)
    samples = opened(tmp_path)
    assert samples.batch(range(600))["input_ids"].ravel().tolist() == expected_tokens()[: 600 * LENGTH]
    assert rows.opened == 2
    samples.close()


class Dead:
    """A dataset that can be opened and never read."""

    def __call__(self, _: HubText) -> Any:
        return self

    def __iter__(self) -> Iterator[dict[str, str]]:
        raise ConnectionError("the line went dead")


def test_a_stream_that_stays_broken(
    tmp_path: Path, from_rows: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Event, "wait", lambda event, timeout=None: event.is_set())
    from_rows(Dead())
    with pytest.raises(DataError, match=r"org/some was interrupted .*the line went dead.*check the network"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"content": "w1"}, "has no 'text', found content"),
        ({"text": 3}, "holds a int"),
        ({"text": ""}, "holds no text"),
    ],
)
def test_bad_rows(tmp_path: Path, from_rows: Callable[[Any], None], row: dict[str, Any], message: str) -> None:
    from_rows(lambda _: [row])
    with pytest.raises(DataError, match=message):
        opened(tmp_path)


def test_a_full_disk(tmp_path: Path, from_rows: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    from_rows(Rows())

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(streams.os, "fsync", full)
        with pytest.raises(DataError, match=r"the disk or quota of the token cache .* is full: make room"):
            opened(tmp_path)
    samples = opened(tmp_path)
    assert samples.batch([1])["input_ids"][0].tolist() == expected_tokens()[LENGTH : 2 * LENGTH]
    samples.close()


def test_filesystems_without_locks(
    tmp_path: Path, from_rows: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are written whole and renamed, which two can do at once; two that append to one file would ruin it."""

    def no_locks(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    from_rows(Rows())
    with pytest.raises(DataError, match=r"can't be used \(No locks available\)"):
        opened(tmp_path)
    path = tmp_path / "some.txt"
    path.write_text("w1 w2 w3", encoding="utf-8")
    samples = open_samples(str(path), TOKENIZER, objective="causal", sequence_length=2, cache=tmp_path)
    assert samples.epoch_samples == 2


def test_a_stream_that_is_too_short(tmp_path: Path, from_rows: Callable[[Any], None]) -> None:
    from_rows(lambda _: [{"text": "w1 w2"}])
    with pytest.raises(DataError, match=r"has 3 tokens, fewer than one sample of 17"):
        opened(tmp_path)


def test_readers_in_other_processes(tmp_path: Path, from_rows: Callable[[Any], None]) -> None:
    """They get what they ask for although the writer's own process asks for less."""
    from_rows(Rows())
    main: list[Samples] = []
    reader = opened(tmp_path, is_local_main=False, wait=lambda: main.append(opened(tmp_path)))
    assert reader.batch([500])["input_ids"][0].tolist() == expected_tokens()[500 * LENGTH : 501 * LENGTH]
    main[0].close()
    with pytest.raises(DataError, match="first process of this machine"):
        opened(tmp_path / "other", is_local_main=False)


def test_two_runs_share_a_stream(tmp_path: Path, from_rows: Callable[[Any], None]) -> None:
    rows = Rows()
    from_rows(rows)
    one, other = opened(tmp_path), opened(tmp_path)
    assert (other.batch([200])["labels"] == one.batch([200])["labels"]).all()
    one.close()
    assert other.batch([600])["input_ids"][0].tolist() == expected_tokens()[600 * LENGTH : 601 * LENGTH]
    other.close()


def test_a_stream_beside_files(tmp_path: Path, from_rows: Callable[[Any], None]) -> None:
    from_rows(Rows())
    path = tmp_path / "some.txt"
    path.write_text(" ".join(["w499"] * 100), encoding="utf-8")
    samples = open_samples(
        ["org/some", {"source": str(path), "weight": 3}],
        TOKENIZER,
        objective="causal",
        sequence_length=LENGTH,
        seed=3,
        cache=tmp_path,
    )
    inputs = samples.batch(range(40))["input_ids"]
    assert ((inputs == 502).mean(axis=1) > 0.9).sum() == 30
    samples.close()


@pytest.mark.parametrize("objective", ["causal", "span_corruption"])
def test_evaluation_reads_the_beginning(tmp_path: Path, from_rows: Callable[[Any], None], objective: str) -> None:
    rows = Rows()
    from_rows(rows)
    blocks = evaluation_blocks(
        "org/some", TOKENIZER, objective=objective, sequence_length=32, tokens=1000, cache=tmp_path
    )
    batch = blocks.batch(range(len(blocks)))
    if objective == "causal":
        assert batch["labels"][batch["labels"] >= 0].tolist() == expected_tokens()[1:1000]
    assert batch["input_ids"].shape == (len(blocks), 32)
    assert rows.read < 1500


def test_datasets_streams_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(
        "".join(json.dumps({"text": text_of(number), "other": number}) + "\n" for number in range(DOCUMENTS)),
        encoding="utf-8",
    )
    load, calls = datasets.load_dataset, []

    def local(dataset: str, **settings: Any) -> Any:
        calls.append((dataset, settings))
        return load(
            "json", data_files=str(path), split=settings["split"], streaming=True, cache_dir=str(tmp_path / "hub")
        )

    monkeypatch.setattr(datasets, "load_dataset", local)
    samples = opened(tmp_path / "cache")
    samples.batch(range(100))
    samples.close()
    (commit,) = (tmp_path / "cache").glob("*.json")
    assert json.loads(commit.read_text())["commit"][3] is not None
    again = opened(tmp_path / "cache")
    assert again.batch(range(700))["input_ids"].ravel().tolist() == expected_tokens()[: 700 * LENGTH]
    again.close()
    assert calls[0] == ("org/some", {"name": None, "split": "train", "revision": "0" * 40, "streaming": True})
    other = [{"source": "org/some", "text_field": "content"}]
    with pytest.raises(DataError, match="has no 'content', found text, other"):
        open_samples(other, TOKENIZER, objective="causal", sequence_length=LENGTH, cache=tmp_path / "cache")


def test_commits_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Answer:
        sha = "a" * 40

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: Answer)
    assert hub_rows.commit_of("org/some", "b" * 40, tmp_path, ask=True) == "b" * 40
    assert hub_rows.commit_of("org/some", None, tmp_path, ask=True) == "a" * 40

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    assert hub_rows.commit_of("org/some", None, tmp_path, ask=True) == "a" * 40
    assert hub_rows.commit_of("org/some", None, tmp_path, ask=False) == "a" * 40
    with pytest.raises(
        DataError, match=r"the Hub could not be reached to look for a dataset of this name \(no route to host\)"
    ):
        hub_rows.commit_of("org/other", None, tmp_path, ask=True)
