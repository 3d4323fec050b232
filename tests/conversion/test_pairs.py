"""Pairs as calibration: every row is the beginning of a pair, and no pair is in two parts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gqa_convert import convert_checkpoint
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.calibration import own_text
from gqa_convert.conversion.calibration.batches import prepare_calibration
from gqa_convert.conversion.calibration.own_text import OwnWriter
from gqa_convert.conversion.calibration.streams import Calibration
from gqa_convert.conversion.calibration.texts import open_text
from gqa_convert.conversion.options import CalibrationOptions, ConversionOptions
from gqa_convert.conversion.plan import make_plan
from gqa_convert.errors import DataError, OptionError
from gqa_convert.families.loading import load_model
from gqa_convert.runtime.machine import multiplies_bfloat16
from tests.helpers import seq2seq
from tests.helpers.calibrations import calibration_batches
from tests.helpers.fitting import divergence
from tests.helpers.seq2seq import BOS, EOS

START = 2
WORD = 5
"""The token of w0."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def bart(tmp_path: Path) -> Path:
    return seq2seq.model(
        tmp_path / "bart", "bart", seq2seq.bart_tokenizer(), decoder_start_token_id=START
    )


def write(
    path: Path, count: int, names: tuple[str, str] = ("source", "target")
) -> list[tuple[str, str]]:
    """Pairs whose target is the source backwards; each begins and ends with two words that tell
    which one it is.
    """
    random = np.random.default_rng(0)
    pairs = []
    for number in range(count):
        mark = f"w{number // 40} w{number % 40}"
        source = f"{mark} {seq2seq.words(random, int(random.integers(1, 12)))} {mark}"
        pairs.append((source, " ".join(reversed(source.split()))))
    path.write_text(
        "".join(json.dumps(dict(zip(names, pair, strict=True))) + "\n" for pair in pairs)
    )
    return pairs


def tokens(text: str) -> list[int]:
    return [BOS, *(WORD + int(word[1:]) for word in text.split()), EOS]


def cut(ids: list[int], length: int) -> list[int]:
    return ids if len(ids) <= length else [*ids[: length - 1], ids[-1]]


def pairs_in(batches: list[dict[str, Any]], pairs: list[tuple[str, str]]) -> list[int]:
    """The number of the pair that each row of batches is, after comparing all that is in it."""
    found = []
    for batch in batches:
        assert (batch["decoder_input_ids"][:, 0] == START).all()
        assert (batch["decoder_input_ids"][:, 1:] == batch["labels"][:, :-1]).all()
        for source, target in zip(
            batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True
        ):
            number = (source[1] - WORD) * 40 + source[2] - WORD
            assert source == cut(tokens(pairs[number][0]), len(source))
            assert target == cut(tokens(pairs[number][1]), len(target))
            found.append(number)
    return found


def kept(made: Calibration, pairs: list[tuple[str, str]], numbers: list[int]) -> float:
    return made.tokens / sum(len(tokens(text)) for number in numbers for text in pairs[number])


def test_rows_are_pairs_and_parts_have_none_in_common(bart: Path, tmp_path: Path) -> None:
    pairs = write(tmp_path / "pairs.jsonl", 600)
    made = calibration_batches(
        bart, tmp_path / "pairs.jsonl", 6000, seed=1, held_out_tokens=900, fresh_tokens=2000
    )
    parts = [pairs_in(batches, pairs) for batches in (made.batches, made.held_out, made.fresh)]
    used = [number for part in parts for number in part]
    assert len(used) == len(set(used))
    assert len(parts[0]) > len(parts[1]) > 0
    assert kept(made, pairs, parts[0]) > 0.85
    assert made.tokens == sum(
        batch[side].numel() for batch in made.batches for side in ("input_ids", "labels")
    )
    assert "pairs of source and target" in made.description
    assert made.warning is None
    again = calibration_batches(bart, tmp_path / "pairs.jsonl", 6000, seed=1, held_out_tokens=900)
    assert again.digest == made.digest
    other = calibration_batches(bart, tmp_path / "pairs.jsonl", 6000, seed=2)
    assert other.digest != made.digest


def test_validation_is_not_of_the_longest_pairs(bart: Path, tmp_path: Path) -> None:
    """Pairs of about one length are together in a batch, and the last batches validate."""
    write(tmp_path / "pairs.jsonl", 600)
    places = set()
    for seed in range(4):
        made = calibration_batches(bart, tmp_path / "pairs.jsonl", 8000, seed=seed)
        lengths = [batch["labels"].shape[1] for batch in made.batches]
        assert len(lengths) > 2
        places.add(lengths.index(max(lengths)))
    assert len(places) > 1


def test_fields_may_be_stated_and_little_text_is_told(bart: Path, tmp_path: Path) -> None:
    pairs = write(tmp_path / "pairs.jsonl", 40, ("en", "de"))
    stated = {"source": str(tmp_path / "pairs.jsonl"), "source_field": "en", "target_field": "de"}
    made = calibration_batches(bart, stated, 100_000, seed=1, held_out_tokens=100)
    assert len(pairs_in(made.batches, pairs)) + len(pairs_in(made.held_out, pairs)) == 40
    assert "of the 100000 calibration tokens requested" in str(made.warning)


def test_pairs_and_running_text_are_not_mixed(bart: Path, tmp_path: Path) -> None:
    write(tmp_path / "pairs.jsonl", 40)
    (tmp_path / "text.txt").write_text("w1 w2 " * 200)
    with pytest.raises(
        DataError, match=r"pairs\.jsonl holds pairs of source and target, and .*text\.txt does not"
    ):
        calibration_batches(
            bart, [str(tmp_path / "pairs.jsonl"), str(tmp_path / "text.txt")], 1000, seed=0
        )


def test_an_encoder_decoder_writes_no_text_of_its_own(bart: Path) -> None:
    plan = make_plan(open_checkpoint(bart), 3, method="fit")
    with pytest.raises(OptionError, match="only decoders write text: name text for it instead"):
        prepare_calibration(plan, CalibrationOptions("self", tokens=1000, device="cpu"))


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_a_conversion_on_pairs(kind: str, tmp_path: Path) -> None:
    source = seq2seq.model(
        tmp_path / "source", kind, seq2seq.bart_tokenizer(), decoder_start_token_id=START
    )
    write(tmp_path / "pairs.jsonl", 300)
    options = CalibrationOptions(
        source=str(tmp_path / "pairs.jsonl"), tokens=3000, steps=3, kl_steps=3, device="cpu"
    )
    result = convert_checkpoint(source, tmp_path / "out", 3, ConversionOptions(calibration=options))
    assert result.calibration is not None
    assert result.calibration.kl is not None
    path = tmp_path / "pairs.jsonl"
    drawn = calibration_batches(
        source, path, 3000, seed=0, held_out_tokens=2048, fresh_tokens=3 * 2048
    )
    models = [load_model(folder, torch.float32)[0].eval() for folder in (source, tmp_path / "out")]
    assert divergence(*models, drawn.held_out) == pytest.approx(
        result.calibration.kl.after, rel=2e-3
    )
    assert "pairs of source and target" in result.calibration.text


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_the_source_writes_what_is_missing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs alone, answered as transformers' own generation answers them one by one."""
    monkeypatch.setattr(own_text, "TARGET", 6)
    tokenizer = seq2seq.bart_tokenizer()
    source = seq2seq.model(tmp_path / "source", kind, tokenizer, decoder_start_token_id=START)
    pairs = write(tmp_path / "pairs.jsonl", 60)
    inputs = tmp_path / "inputs.jsonl"
    inputs.write_text("".join(json.dumps({"source": read}) + "\n" for read, _ in pairs))
    writer = OwnWriter(open_checkpoint(source), "cpu")
    made = writer.answer(open_text(inputs).text, "source", 10**6)
    rows = [json.loads(line) for line in Path(made.stated.source).read_text().splitlines()]
    assert sorted(row["source"] for row in rows) == sorted(read for read, _ in pairs)
    model, _ = load_model(
        source, torch.bfloat16 if multiplies_bfloat16(torch.device("cpu")) else torch.float32
    )
    same = 0
    for row in rows[:20]:
        ids = tokenizer(row["source"], return_tensors="pt")["input_ids"]
        alone = model.generate(ids, num_beams=1, do_sample=False, max_new_tokens=6)
        same += tokenizer.decode(alone[0], skip_special_tokens=True) == row["target"]
    assert same >= 18  # rounding may turn a greedy choice between random weights
    options = CalibrationOptions(source=str(inputs), tokens=600, steps=2, kl_steps=0, device="cpu")
    result = convert_checkpoint(source, tmp_path / "out", 3, ConversionOptions(calibration=options))
    assert result.calibration is not None
    assert "inputs.jsonl with targets that source writes: " in result.calibration.text
