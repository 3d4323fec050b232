"""What is mixed into calibration text."""

import json
import re
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion import resources
from gqa_convert.conversion.calibration import mixture, own_text
from gqa_convert.conversion.calibration import text as calibration_text
from gqa_convert.conversion.calibration.batches import prepare_calibration
from gqa_convert.conversion.calibration.blocks import Text
from gqa_convert.conversion.calibration.made_up_records import made_up_records, record_blocks
from gqa_convert.conversion.calibration.streams import Request
from gqa_convert.conversion.calibration.texts import open_text
from gqa_convert.conversion.options import CalibrationOptions
from gqa_convert.conversion.plan import make_plan
from gqa_convert.demo import CHECKPOINT as DEMO
from gqa_convert.errors import DataError
from tests.helpers.chat_template import with_chat_template
from tests.helpers.command_line import run

LENGTH = 64
OWN_LENGTH = 40
WORD = "zebra "


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """Text that can be told from all that is mixed in."""
    file = tmp_path / "words.txt"
    file.write_text(WORD * 20_000)
    return file


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_text, "LENGTH", OWN_LENGTH)


def prepared(source: Any, *, model: Path = DEMO, **options: Any) -> Any:
    plan = make_plan(open_checkpoint(str(model)), 3, method="fit")
    given = {
        "tokens": 100 * LENGTH,
        "sequence_length": LENGTH,
        "kl_steps": 0,
        "device": "cpu",
    } | options
    return prepare_calibration(plan, CalibrationOptions(source, **given))


def decoded(batches: Any) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    return [tokenizer.decode(row) for batch in batches for row in batch["input_ids"]]


def test_a_quarter_of_the_blocks_is_mixed_in(words: Path) -> None:
    made = prepared(str(words))
    texts = decoded(made.batches)
    assert len(texts) == 100
    assert sum("zebra" in text for text in texts) == 75
    half = texts[:50], texts[50:]
    assert all(abs(sum("zebra" in text for text in part) - 37.5) < 3 for part in half), (
        "in every part of the text"
    )
    assert re.search(
        r"; mixed in: 10% text of its own, 8% Python sources, 7% made-up records$", made.description
    )
    assert made.mixed_in == "10% text of its own, 8% Python sources, 7% made-up records"


def test_records_lie_among_paragraphs_of_single_documents(
    words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = ["a" * 150 + "\n", "short\n\n" + "b" * 150]
    given: list[str] = []
    monkeypatch.setattr(mixture, "first_texts", lambda _: documents)

    def noted(tokenizer: Any, length: int, count: int, seed: int, filler: list[str]) -> Any:
        given.extend(filler)
        return record_blocks(tokenizer, length, count, seed, filler)

    monkeypatch.setattr(mixture, "record_blocks", noted)
    prepared(str(words))
    assert given == ["a" * 150 + "\n", "b" * 150]


def test_a_model_with_a_chat_template_converses(words: Path, tmp_path: Path) -> None:
    model = with_chat_template(tmp_path / "model")
    made = prepared(str(words), model=model, tokens=200 * LENGTH)
    assert (
        "mixed in: 5% text of its own, 5% conversations of its own, 8% Python sources"
        in made.description
    )
    texts = decoded(made.batches)
    assert sum("zebra" in text for text in texts) == 150
    assert 5 <= sum("<user>" in text or "<assistant>" in text for text in texts) <= 10


def test_nothing_is_mixed_in_unasked_or_where_nothing_is_trained(words: Path) -> None:
    plain = prepared(str(words), mix=False)
    assert all("zebra" in text for text in decoded(plain.batches))
    assert plain.mixed_in == ""
    plan = make_plan(open_checkpoint(str(DEMO)), 3, method="factor")
    factored = prepare_calibration(
        plan, CalibrationOptions(str(words), tokens=640, sequence_length=LENGTH)
    )
    assert all("zebra" in text for text in decoded(factored.batches))


def test_little_text_stays_three_quarters_of_all(tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text(WORD * 600)
    made = prepared(str(tmp_path / "few.txt"), tokens=10_000)
    texts = decoded(made.batches)
    own = sum("zebra" in text for text in texts)
    assert own / len(texts) >= 0.75
    assert len(texts) > own
    assert made.warning is not None


def test_kinds_that_the_user_brings_are_not_mixed_in(words: Path) -> None:
    brought = ["self", "python-stdlib", str(words)]
    assert prepared(brought).mixed_in == "7% made-up records"
    assert prepared(brought[2:] * 2).mixed_in.count(",") == 2


def test_what_does_not_exist_is_refused_before_text_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(own_text.OwnWriter, "write", lambda *_: pytest.fail("text was written"))
    with pytest.raises(DataError, match=r"absent\.txt does not exist"):
        prepared("absent.txt")


def refused(*_: Any, **__: Any) -> None:
    raise DataError("the tokenizer has no token that begins a document: name text instead")


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [(resources, "free_memory", lambda device: 1000), (own_text.OwnWriter, "write", refused)],
)
def test_a_model_that_does_not_fit_or_cannot_write_is_calibrated_without_its_own_text(
    module: Any, name: str, instead: Any, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, instead)
    assert "; mixed in: 8% Python sources" in prepared(str(words)).description


def test_the_command_says_what_is_mixed_in(small: Path, words: Path, tmp_path: Path) -> None:
    options = [
        "-n",
        "3",
        "-c",
        words,
        "--calibration-tokens",
        "640",
        "--calibration-length",
        "64",
        "--fit-steps",
        "1",
    ]
    shown = run("convert", small, tmp_path / "out", *options, "--kl-steps", "0")
    assert shown.returncode == 0, shown.stderr
    assert "note: mixed into the calibration text" in shown.stderr
    record = json.loads((tmp_path / "out" / "gqa_conversion.json").read_text())["calibration"]
    assert "made-up records" in record["text"]
    refused = run(
        "convert", DEMO, tmp_path / "other", "-n", "3", "-m", "factor", "-c", words, "--no-mix"
    )
    assert refused.returncode == 2
    assert "--no-mix" in refused.stderr


def test_blocks_of_records_begin_with_a_document_and_more_of_them_begin_alike() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    few, many = (record_blocks(tokenizer, 128, count, 3) for count in (2, 5))
    assert few.shape == (256,)
    assert np.array_equal(many[:256], few)
    assert not np.array_equal(record_blocks(tokenizer, 128, 2, 4), few)
    first = next(made_up_records(3, 307, ()))
    assert tokenizer.decode(few[:128]).startswith(first[:60])


def test_what_a_document_asks_for_stands_above() -> None:
    """Every answer is what the facts say, which no model can know."""
    documents = list(islice(made_up_records(1, 1500, ["Some other paragraph."]), 400))
    assert len(set(documents)) == 400
    asked = 0
    for document in documents:
        facts, _, questions = document.rstrip("\n").rpartition("\n\n")
        for question, answer in re.findall(r"What is the \w+ of (.+)\?\n(.+)", questions):
            asked += 1
            assert re.search(
                rf"{re.escape(question)}(?s:.)*?{re.escape(answer)}|{re.escape(answer)}.*{re.escape(question)}",
                facts,
            )
    assert asked > 50
    lengths = sorted(map(len, documents))
    assert lengths[0] < 400
    assert 1000 < lengths[-1] < 4000


def test_questions_are_not_copied_over(
    words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans are copied over the ends of other blocks that are stretched; positions skip in both."""
    source = shutil.copytree(DEMO, tmp_path / "source")
    config = json.loads((source / "config.json").read_text()) | {"max_position_embeddings": 2048}
    (source / "config.json").write_text(json.dumps(config))
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokens = record_blocks(tokenizer, 512, 4, 1)
    records = Text("made-up records", tokens, 0.5, can_be_copied_into=False, is_sampled=True)
    monkeypatch.setattr(calibration_text, "mix_in", lambda *_, **__: ([records], []))
    request = Request(source, 8 * 512, length=512, context=2048)
    made = calibration_text.draw_text(request, [open_text(words)], mixes=True)
    rows = [row for batch in made.batches for row in batch["input_ids"]]
    whole = tokens.reshape(4, 512)
    drawn = [row.numpy() for row in rows if "zebra" not in tokenizer.decode(row)]
    assert len(drawn) == 4
    for row, expected in zip(drawn, whole, strict=True):
        assert np.array_equal(row, expected)
    skipping = [
        bool(positions[-1] > 511) for batch in made.batches for positions in batch["position_ids"]
    ]
    assert sum(skipping) == 4
