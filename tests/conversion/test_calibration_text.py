"""Calibration text: blocks of it are what the tokenizer says, wherever they are drawn from."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.bart.modeling_bart import shift_tokens_right

from gqa_convert.conversion.calibration import blocks, texts
from gqa_convert.conversion.calibration import text as calibration_text
from gqa_convert.conversion.calibration.streams import Calibration, calibration_tokens_for
from gqa_convert.data import sources
from gqa_convert.data.hub import HubDataset
from gqa_convert.errors import ConfigError, DataError, GQAConvertError, OptionError
from tests.helpers.calibrations import calibration_batches
from tests.helpers.checkpoints import refused
from tests.helpers.data_helpers import EOS, PAD, WORDS, restored, span_tokenizer
from tests.helpers.evaluate_models import write_rows

LENGTH = 12
SIZES = {"hidden_size": 96, "vocab_size": 700}
CAUSAL = SIZES | {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 100,
}
T5 = SIZES | {
    "model_type": "t5",
    "is_encoder_decoder": True,
    "n_positions": 16,
    "decoder_start_token_id": PAD,
}
BART = SIZES | {"model_type": "gqa_bart", "is_encoder_decoder": True, "decoder_start_token_id": 2}
BART["max_position_embeddings"] = 24


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def model_of(
    folder: Path, config: dict[str, Any], *, sentinels: int | None = None, eos: str | None = "</s>"
) -> Path:
    """A checkpoint without weights; the word w0 is the token 3."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = 100 if config["model_type"] == "t5" else 0
    span_tokenizer(names if sentinels is None else sentinels, eos).save_pretrained(folder)
    return folder


def words(*numbers: int) -> str:
    return " ".join(f"w{number % WORDS}" for number in numbers)


def documents(count: int) -> list[list[int]]:
    """Numbers of words; any few in a row tell where in the text they are."""
    found: list[list[int]] = []
    state = 1
    for number in range(count):
        found.append([])
        for _ in range(3 + number % 5):
            state = state * 48271 % 2147483647
            found[-1].append(state % WORDS)
    return found


def written(path: Path, found: list[list[int]], **more: str) -> Path:
    return write_rows(
        path, [{"id": number, "text": words(*each)} | more for number, each in enumerate(found)]
    )


def stream_of(found: list[list[int]], *, closed: bool = True) -> list[int]:
    return [
        token
        for each in found
        for token in (*(3 + number for number in each), *([EOS] if closed else []))
    ]


def rows_of(calibration: Calibration, name: str = "input_ids") -> list[list[int]]:
    return [row for batch in calibration.batches for row in batch[name].tolist()]


def attention_kind_of(row: list[int], stream: list[int]) -> int:
    """Where a run of tokens is in a stream."""
    (place,) = (start for start in range(len(stream)) if stream[start : start + len(row)] == row)
    return place


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"hidden_size": 40, "max_position_embeddings": 64}, 20032),  # 500 per hidden dimension
        ({"hidden_size": 768, "max_position_embeddings": 64}, 24576),
        ({"hidden_size": 4096, "max_position_embeddings": 65536}, 32 * 1024),
        ({"hidden_size": 4096, "max_position_embeddings": 1000}, 33 * 1000),
        ({"model_type": "some", "text_config": {"d_model": 10}}, 5 * 1024),
        (
            {"model_type": "gqa_t5", "d_model": 2048, "n_positions": 512},
            87 * 568,
        ),  # T5's 568 for an input of 512
    ],
)
def test_the_default_number_of_tokens(config: dict[str, Any], tokens: int) -> None:
    assert calibration_tokens_for({"model_type": "llama"} | config) == tokens
    with pytest.raises(ConfigError, match="no hidden_size"):
        calibration_tokens_for({"model_type": "some"})


def test_a_text_is_used_whole_where_it_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BATCH_TOKENS", 30)
    model, found = model_of(tmp_path / "model", CAUSAL), documents(19)
    tokens = stream_of(found)
    assert len(tokens) % LENGTH > 1
    made = calibration_batches(
        model, written(tmp_path / "a.jsonl", found), 10**6, seed=3, sequence_length=LENGTH
    )
    rows = sorted(rows_of(made), key=lambda row: attention_kind_of(row, tokens))
    assert [token for row in rows for token in row] == tokens
    assert (made.tokens, made.sequence_length) == (len(tokens), LENGTH)
    shapes = [tuple(batch["input_ids"].shape) for batch in made.batches]
    assert shapes == [*[(2, 12)] * 4, (1, 12), (1, len(tokens) - 108)]
    assert all(
        set(batch) == {"input_ids"} and batch["input_ids"].dtype == torch.int64
        for batch in made.batches
    )
    assert made.warning is not None
    assert f"has only {len(tokens)}" in made.warning
    assert (
        f"{len(tokens)} tokens of {tmp_path / 'a.jsonl'}: 10 blocks of up to 12" in made.description
    )


def test_a_last_token_alone_is_no_block(tmp_path: Path) -> None:
    model, path = model_of(tmp_path / "model", CAUSAL), written(tmp_path / "a.jsonl", documents(19))
    assert len(stream_of(documents(19))) == 3 * 37 + 1
    made = calibration_batches(model, path, 10**6, seed=3, sequence_length=37)
    assert [len(row) for row in rows_of(made)] == [37, 37, 37]


def test_blocks_come_from_all_over_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BATCH_TOKENS", 64)
    model, found = model_of(tmp_path / "model", CAUSAL), documents(503)
    tokens, path = stream_of(found), written(tmp_path / "a.jsonl", found)
    starts = {}
    for seed in range(4):
        made = calibration_batches(model, path, 20 * LENGTH - 5, seed=seed, sequence_length=LENGTH)
        assert (made.tokens, made.warning) == (20 * LENGTH, None)
        assert [tuple(batch["input_ids"].shape) for batch in made.batches] == [(5, LENGTH)] * 4
        starts[seed] = [attention_kind_of(row, tokens) for row in rows_of(made)]
        places = sorted(starts[seed])
        assert all(after - before >= LENGTH for before, after in pairwise(places))
        assert starts[seed] != places
        assert places[3] < len(tokens) / 2 < places[-4]
        again = calibration_batches(model, path, 20 * LENGTH - 5, seed=seed, sequence_length=LENGTH)
        assert again.digest == made.digest
        assert rows_of(again) == rows_of(made)
    assert len({tuple(each) for each in starts.values()}) == 4
    assert len({start % LENGTH for each in starts.values() for start in each}) > 1


def test_further_blocks_do_not_change_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many the last stage asks for, layers are fitted on the same blocks of a text that
    is read in part.
    """
    model, path = (
        model_of(tmp_path / "model", CAUSAL),
        written(tmp_path / "a.jsonl", documents(3000)),
    )
    monkeypatch.setattr(texts, "_WHOLE", 1000)
    sizes = {"sequence_length": LENGTH, "held_out_tokens": 2 * LENGTH}
    wanted = (0, 10 * LENGTH, 10**6)
    made = [
        calibration_batches(model, path, 5 * LENGTH, seed=1, **sizes, fresh_tokens=fresh)
        for fresh in wanted
    ]
    assert len({each.digest for each in made}) == 1
    assert rows_of(made[0]) == rows_of(made[1]) == rows_of(made[2])
    assert [sum(len(batch["input_ids"]) for batch in each.fresh) for each in made[:2]] == [0, 10]
    assert sum(len(batch["input_ids"]) for batch in made[2].fresh) > 10


def test_the_four_streams_have_no_block_in_common(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BATCH_TOKENS", 4 * LENGTH)
    model = model_of(tmp_path / "model", CAUSAL)
    path = written(tmp_path / "a.jsonl", documents(503))
    sizes = {"held_out_tokens": 5 * LENGTH, "fresh_tokens": 7 * LENGTH}
    made = calibration_batches(model, path, 24 * LENGTH, seed=1, sequence_length=LENGTH, **sizes)
    streams = [made.fitted, made.validation, made.held_out, made.fresh]
    rows = [
        [tuple(row) for batch in each for row in batch["input_ids"].tolist()] for each in streams
    ]
    assert [len(each) for each in rows] == [21, 3, 5, 7]
    assert len({row for each in rows for row in each}) == 36
    assert sorted([*rows[0], *rows[1]]) == sorted(map(tuple, rows_of(made)))


@pytest.mark.parametrize("filler", [0, 500])
def test_a_large_text_is_thinned_evenly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filler: int
) -> None:
    """Only documents that are kept are tokenised; where rows hold other fields beside the text,
    more of them are.
    """
    model, found = model_of(tmp_path / "model", CAUSAL), documents(3000)
    path = written(tmp_path / "a.jsonl", found, other=filler * "x")
    monkeypatch.setattr(texts, "_WHOLE", 1000)
    tokenised: list[str] = []
    monkeypatch.setattr(texts, "batched", lambda pieces: [watched(list(pieces), tokenised)])
    made = calibration_batches(model, path, 20 * LENGTH, seed=1, sequence_length=LENGTH)
    assert (made.tokens, made.warning) == (20 * LENGTH, None)
    numbers = sorted(
        found.index([int(word[1:]) for word in text.split()]) for text in set(tokenised)
    )
    assert 100 < len(numbers) < 1500
    gaps = [after - before for before, after in pairwise([*numbers, 3000])]
    assert max(gaps) < 3 * 3000 / len(numbers)
    tokens = stream_of([found[number] for number in numbers])
    assert all(attention_kind_of(row, tokens) >= 0 for row in rows_of(made))
    whole = calibration_batches(model, path, 10**6, seed=1, sequence_length=LENGTH)
    assert whole.tokens == len(stream_of(found)) - (len(stream_of(found)) % LENGTH == 1)


def watched(pieces: list[Any], seen: list[str]) -> list[Any]:
    seen[:] = [piece.text for piece in pieces]
    return pieces


def test_a_hub_dataset_is_streamed_as_far_as_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, read = documents(4000), []

    def rows(_: HubDataset) -> Iterator[dict[str, str]]:
        for number, each in enumerate(found):
            read.append(number)
            yield {"body": words(*each)}

    monkeypatch.setattr(sources, "commit_of", lambda *_, **__: "5" * 40)
    monkeypatch.setattr(HubDataset, "open_rows", rows)
    monkeypatch.setattr("gqa_convert.data.token_files._BATCH_PIECES", 50)
    model = model_of(tmp_path / "model", CAUSAL)
    source = {"source": "org/some", "text_field": "body", "split": "validation"}
    made = calibration_batches(model, source, 10 * LENGTH, seed=2, sequence_length=LENGTH)
    tokens = stream_of(found)[: 16 * 10 * LENGTH]
    places = [attention_kind_of(row, tokens) for row in rows_of(made)]
    assert max(places) > len(tokens) / 2
    assert len(read) < 1000
    assert "org/some@555555555555" in made.description
    read.clear()
    assert (
        calibration_batches(model, source, 10 * LENGTH, seed=2, sequence_length=LENGTH).digest
        == made.digest
    )
    assert len(read) < 1000


def test_t5_gets_text_with_spans_taken_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BATCH_TOKENS", 100)
    monkeypatch.setattr(calibration_text, "_LEAST", 2)
    model, found = model_of(tmp_path / "model", T5), documents(300)
    path, tokens = written(tmp_path / "a.jsonl", found), stream_of(found, closed=False)
    for wanted, length in ((400, 40), (10**6, 40), (10**6, None)):
        made = calibration_batches(model, path, wanted, seed=5, sequence_length=length)
        assert made.sequence_length == (length or 512)
        used = []
        for batch in made.batches:
            assert (batch["decoder_input_ids"][:, 0] == PAD).all()
            assert (batch["decoder_input_ids"][:, 1:] == batch["labels"][:, :-1]).all()
            used += [
                restored(*rows)
                for rows in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
            ]
        assert made.tokens == sum(map(len, used))
        places = sorted((attention_kind_of(row, tokens), len(row)) for row in used)
        assert all(start + count <= after for (start, count), (after, _) in pairwise(places))
        if wanted == 400:
            assert made.tokens >= 400
            assert made.warning is None
        else:
            assert len(tokens) - 1 <= made.tokens <= len(tokens)
    short = calibration_batches(model, written(tmp_path / "b.jsonl", [[4, 9, 11]]), 10**6, seed=5)
    assert restored(*rows_of(short), *rows_of(short, "labels")) == [7, 12, 14]
    other = calibration_batches(model, path, 10**6, seed=6)
    assert other.digest != made.digest


def test_bart_gets_a_block_on_both_sides(tmp_path: Path) -> None:
    model, found = model_of(tmp_path / "model", BART), documents(100)
    tokens = stream_of(found)
    made = calibration_batches(model, written(tmp_path / "a.jsonl", found), 100, seed=5)
    assert (made.sequence_length, made.tokens) == (24, 120)
    for batch in made.batches:
        assert (
            batch["decoder_input_ids"].tolist()
            == shift_tokens_right(batch["input_ids"], PAD, 2).tolist()
        )
        assert batch["labels"].tolist() == batch["input_ids"].tolist()
    assert all(attention_kind_of(row, tokens) >= 0 for row in rows_of(made))


def test_short_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = model_of(tmp_path / "model", CAUSAL), tmp_path / "a.txt"
    path.write_text(" ".join(["w5"] * 50))
    with pytest.raises(
        DataError,
        match="holds 51 tokens, calibration needs at least 64, and thousands to be of use",
    ):
        calibration_batches(model, path, 1000, seed=0)
    monkeypatch.setattr(calibration_text, "_LEAST", 2)
    path.write_text("w5")
    made = calibration_batches(model, path, 1000, seed=0)
    assert rows_of(made) == [[8, EOS]]
    assert "1 block of 2" in made.description
    path.write_text("")
    with pytest.raises(DataError, match="holds 0 tokens, calibration needs at least 2,"):
        calibration_batches(model, path, 1000, seed=0)
    other = written(tmp_path / "other.jsonl", documents(20))
    with pytest.raises(DataError, match=rf"^{path} holds 0 tokens"):
        calibration_batches(model, [str(other), str(path)], 1000, seed=0)
    path.write_text("w5")
    with pytest.raises(DataError, match="holds 1 tokens"):
        calibration_batches(model_of(tmp_path / "t5", T5), path, 1000, seed=0)


@pytest.mark.parametrize(
    ("config", "options", "error", "says"),
    [
        (CAUSAL, {"sequence_length": 1}, OptionError, "sequence length is 1 tokens"),
        (CAUSAL, {"sequence_length": 0}, OptionError, "sequence length is 0 tokens"),
        (
            CAUSAL,
            {"sequence_length": 101},
            OptionError,
            "sequence length is 101 tokens, .* positions for 100",
        ),
        (
            T5,
            {"sequence_length": 2000},
            DataError,
            "needs 111 sentinel tokens, the tokenizer has 100",
        ),
        (
            CAUSAL | {"vocab_size": 400},
            {},
            DataError,
            r"produces token \d+, and the model has a vocabulary of 400",
        ),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path,
    config: dict[str, Any],
    options: dict[str, Any],
    error: type[GQAConvertError],
    says: str,
) -> None:
    model, path = (
        model_of(tmp_path / "model", config),
        written(tmp_path / "a.jsonl", documents(200)),
    )
    with pytest.raises(error, match=says) as caught:
        calibration_batches(model, **{"source": path, "tokens": 1000, "seed": 0, **options})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model_type", ["llama", "t5", "marian"])
def test_no_tokenizer(tmp_path: Path, model_type: str) -> None:
    """For several of these, transformers makes up a tokenizer without words."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with refused(DataError, "has no tokenizer"):
        calibration_batches(tmp_path, written(tmp_path / "a.jsonl", documents(20)), 100, seed=0)
