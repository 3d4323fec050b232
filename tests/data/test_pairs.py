"""Pairs of texts: what of them is read, in which order, and what a batch holds."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gqa_convert.data.hub import HubDataset
from gqa_convert.data.pairs import shortened
from gqa_convert.data.samples import Samples
from tests.helpers.data_helpers import evaluation_blocks, open_samples
from tests.helpers.seq2seq import BOS, EOS, MASK, bart_tokenizer, write_pairs

PAIRS = {"source_field": "a", "target_field": "b"}


def opened(sources: Any, tokenizer: Any, cache: Path, **keys: Any) -> Samples:
    given = {
        "objective": "pairs",
        "sequence_length": 32,
        "decoder_start": EOS,
        "cache": cache,
    } | keys
    return open_samples(sources if isinstance(sources, list) else [sources], tokenizer, **given)


def rows_of(batch: dict[str, np.ndarray]) -> set[tuple[str, str]]:
    """The pairs in a batch, as words again."""
    mask = batch.get("attention_mask", np.ones_like(batch["input_ids"]))
    found = set()
    for ids, seen, labels in zip(batch["input_ids"], mask, batch["labels"], strict=True):
        texts = [ids[seen == 1].tolist(), labels[labels != -100].tolist()]
        for text in texts:
            assert (text[0], text[-1]) == (BOS, EOS)
        source, target = (
            " ".join(f"w{token - MASK - 1}" for token in text[1:-1]) for text in texts
        )
        found.add((source, target))
    return found


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "nested", "nested parquet", "hub"])
def test_every_pair_comes_once_in_an_epoch(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = write_pairs(tmp_path / "p.jsonl", 23)
    rows: list[dict[str, Any]] = [{"a": source, "b": target} for source, target in pairs]
    keys: dict[str, Any] = PAIRS
    if "nested" in kind:
        rows, keys = [{"t": row} for row in rows], {"source_field": "t.a", "target_field": "t.b"}
        (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = str(tmp_path / "p.jsonl")
    if "parquet" in kind:
        path = str(tmp_path / "p.parquet")
        pq.write_table(pa.Table.from_pylist(rows), path)
    if kind == "hub":
        path, keys = "some/pairs", keys | {"revision": "0" * 40}
        monkeypatch.setattr(HubDataset, "open_rows", lambda _: iter(rows))
    made = opened({"source": path, **keys}, bart_tokenizer(), tmp_path / "cache")
    assert len(made.sources[0].ends) // 2 == 23
    epochs = [made.batch(range(first, first + 23)) for first in (0, 23)]
    assert rows_of(epochs[0]) == rows_of(epochs[1]) == set(pairs)
    assert not np.array_equal(epochs[0]["labels"], epochs[1]["labels"])  # in another order
    tokens = sum(len(source.split()) + len(target.split()) + 4 for source, target in pairs)
    assert made.tokens_per_sample == Fraction(tokens, 23)
    assert (epochs[0]["decoder_input_ids"][:, 0] == EOS).all()
    again = opened({"source": path, **keys}, bart_tokenizer(), tmp_path / "cache")
    assert again.fingerprint == made.fingerprint
    assert (
        opened({"source": path, **keys}, bart_tokenizer(), tmp_path / "cache", seed=1).fingerprint
        != made.fingerprint
    )


def test_sources_keep_their_share(tmp_path: Path) -> None:
    write_pairs(tmp_path / "one.jsonl", 10, longest=4)
    write_pairs(tmp_path / "two.jsonl", 10, longest=12, seed=1)
    sources: list[dict[str, Any]] = [
        {"source": str(tmp_path / f"{name}.jsonl"), **PAIRS} for name in ("one", "two")
    ]
    sources[0]["weight"] = 3
    one, two, both = (
        opened(each, bart_tokenizer(), tmp_path) for each in ([sources[0]], [sources[1]], sources)
    )
    assert (
        both.tokens_per_sample
        == Fraction(3, 4) * one.tokens_per_sample + Fraction(1, 4) * two.tokens_per_sample
    )
    of_one = [
        rows_of(both.batch([number])) <= rows_of(one.batch(range(10))) for number in range(40)
    ]
    assert sum(of_one) == 30


def test_long_texts_are_cut_before_what_closes_them(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(
        json.dumps({"a": "w1 w2 w3 w4 w5 w6", "b": "w7 w8 w9"})
        + "\n"
        + json.dumps({"a": "w1", "b": "w2"})
        + "\n"
    )
    made = opened(
        {"source": str(tmp_path / "p.jsonl"), **PAIRS},
        bart_tokenizer(),
        tmp_path,
        sequence_length=5,
    )
    assert rows_of(made.batch([0, 1])) == {("w1 w2 w3", "w7 w8 w9"), ("w1", "w2")}
    assert made.tokens_per_sample == Fraction(5 + 5 + 3 + 3, 2)
    assert shortened(np.arange(4), 4).tolist() == [0, 1, 2, 3]
    assert shortened(np.arange(9), 1).tolist() == [8]


def test_rows_with_an_empty_side_are_left_out(tmp_path: Path) -> None:
    rows = [
        {"a": "w1", "b": "w2"},
        {"a": "", "b": "w2"},
        {"a": "w1", "b": None},
        {"a": "w3", "b": "w\ud800"},
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = opened({"source": str(tmp_path / "p.jsonl"), **PAIRS}, bart_tokenizer(), tmp_path)
    assert len(made.sources[0].ends) // 2 == 2


def test_evaluation_takes_the_first_pairs(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "p.jsonl", 20)
    sizes = np.cumsum([len(source.split()) + len(target.split()) + 4 for source, target in pairs])
    keys: dict[str, Any] = {
        "objective": "pairs",
        "sequence_length": 32,
        "decoder_start": EOS,
        "cache": tmp_path,
    }
    for limit in (1, int(sizes[6]), int(sizes[6]) + 1, 10**6):
        blocks = evaluation_blocks(
            [{"source": str(tmp_path / "p.jsonl"), **PAIRS}], bart_tokenizer(), tokens=limit, **keys
        )
        assert len(blocks) == max(1, int((sizes <= limit).sum()))
        assert rows_of(blocks.batch(range(len(blocks)))) == set(pairs[: len(blocks)])
