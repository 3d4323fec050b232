"""Text of the source's own as a source of text: generated once, and then read like the same text
in a file.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gqa_convert.checkpoint.source import Checkpoint, open_checkpoint
from gqa_convert.conversion.calibration import own_text
from gqa_convert.conversion.calibration.batches import prepare_calibration
from gqa_convert.conversion.calibration.own_text import OwnWriter, first_texts, has_chat_template
from gqa_convert.conversion.calibration.texts import OpenText, open_text
from gqa_convert.conversion.options import CalibrationOptions
from gqa_convert.conversion.plan import make_plan
from gqa_convert.data.order import mix
from gqa_convert.errors import DataError
from tests.helpers.chat_template import CHAT, with_chat_template
from tests.helpers.uptrain_runs import DEMO
from tests.helpers.verification import edit_json

SMALL: dict[str, Any] = {"tokens": 40}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Texts of few tokens, in a cache and a folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(own_text, "LENGTH", 8)
    monkeypatch.setattr(own_text, "BATCH", 8)
    monkeypatch.chdir(tmp_path)


def file_of(own: OpenText) -> Path:
    return Path(own.stated.source)


def written(own: OpenText) -> list[str]:
    lines = file_of(own).read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line)["text"] for line in lines]


def write(
    model: Path | Checkpoint, cache: Path, tokens: int, *kind: Any, **settings: Any
) -> OpenText:
    checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        return OwnWriter(checkpoint, "cpu", **settings).write(tokens, *kind)


def test_it_is_generated_once_for_each_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    own = write(
        DEMO, tmp_path / "here", **SMALL, progress=lambda done, total: seen.append((done, total))
    )
    assert own.label == "demo_checkpoint's own text (at least 40 tokens at temperature 1, seed 0)"
    assert (seen[0], seen[-1]) == ((0, 40), (40, 40))
    other = write(DEMO, tmp_path / "there", **SMALL)
    assert file_of(own).read_bytes() == file_of(other).read_bytes()
    assert (
        file_of(own).read_bytes()
        != file_of(write(DEMO, tmp_path / "there", **SMALL, seed=1)).read_bytes()
    )

    def refuses(*_: Any, **__: Any) -> None:
        raise DataError("generated again")

    monkeypatch.setattr(own_text, "_Decoder", refuses)
    assert file_of(write(DEMO, tmp_path / "here", **SMALL)) == file_of(own)
    for changed in ({"seed": 1}, {"tokens": 41}):
        with pytest.raises(DataError, match="generated again"):
            write(DEMO, tmp_path / "here", **SMALL | changed)
    shutil.copytree(DEMO, tmp_path / "other")
    with pytest.raises(DataError, match="generated again"):
        write(tmp_path / "other", tmp_path / "here", **SMALL)
    rewritten = replace(open_checkpoint(tmp_path / "other"), rewritten_from=open_checkpoint(DEMO))
    assert file_of(write(rewritten, tmp_path / "here", **SMALL)) == file_of(own)


def test_a_text_may_hold_every_end_of_a_line(tmp_path: Path) -> None:
    rows = [
        {"text": "one\u2028two", "batch": 0},
        {"text": "three", "batch": 0},
        {"text": "later", "batch": 1},
    ]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "own.jsonl").write_text(lines, encoding="utf-8")
    assert first_texts(open_text(tmp_path / "own.jsonl")) == ["one\u2028two", "three"]


def test_it_is_what_generate_samples(tmp_path: Path, fast_bfloat16: bool) -> None:
    texts = written(write(DEMO, tmp_path, **SMALL | {"tokens": 65}))
    model = AutoModelForCausalLM.from_pretrained(
        DEMO, dtype=torch.bfloat16 if fast_bfloat16 else torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    begin = torch.full((8, 1), tokenizer.bos_token_id)
    expected: list[str] = []
    for batch in (0, 1):
        torch.manual_seed(mix(0, batch))
        made = model.generate(
            begin, attention_mask=torch.ones_like(begin), max_new_tokens=8, do_sample=True, top_k=0
        )
        expected += [tokenizer.decode(row, skip_special_tokens=True) for row in made[:, 1:]]
    assert texts == [text for text in expected if text.strip()]


def test_a_model_that_ends_every_text_at_once_is_not_asked_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    padding = AutoTokenizer.from_pretrained(DEMO).pad_token_id
    left = iter([torch.full((8, 3), padding)] * 5)
    monkeypatch.setattr(
        "gqa_convert.conversion.calibration.own_text._Decoder._sampled", lambda *_: next(left)
    )
    assert written(write(DEMO, tmp_path, **SMALL)) == []
    assert next(left, None) is None


def test_a_tokenizer_without_padding(tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path / "source")
    edit_json(tmp_path / "source" / "tokenizer_config.json", pad_token=None)
    assert AutoTokenizer.from_pretrained(tmp_path / "source").pad_token_id is None
    made = write(tmp_path / "source", tmp_path / "here", **SMALL)
    assert written(made) == written(write(DEMO, tmp_path / "there", **SMALL))


def test_conversations_begin_where_the_template_lets_a_user_speak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gqa_convert.conversion.calibration.own_text.QUESTION", 6)
    source = with_chat_template(tmp_path / "source")
    own = write(source, tmp_path / "cache", 40, "conversations")
    found = [json.loads(line)["messages"] for line in file_of(own).read_text().splitlines()]
    assert all([each["role"] for each in messages] == ["user", "assistant"] for messages in found)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)

    def sampled(beginnings: list[str], tokens: int, seed: int) -> list[str]:
        ids = tokenizer(
            beginnings,
            add_special_tokens=False,
            padding=True,
            padding_side="left",
            return_tensors="pt",
        )
        torch.manual_seed(seed)
        made = model.generate(**ids, max_new_tokens=tokens, do_sample=True, top_k=0)
        return tokenizer.batch_decode(
            made[:, ids["input_ids"].shape[1] :], skip_special_tokens=True
        )

    seed = mix(0, 0)
    questions = [each.strip() for each in sampled(["<user>"] * 8, 6, seed) if each.strip()]
    assert [messages[0]["content"] for messages in found[: len(questions)]] == questions
    answers = sampled(
        [f"<user>{question}</user>\n<assistant>" for question in questions], 8, mix(seed, 1)
    )
    assert [messages[1]["content"] for messages in found[: len(answers)]] == answers
    edit_json(source / "config.json", max_position_embeddings=4)
    with pytest.raises(DataError, match="a conversation does not fit the model's 4 positions"):
        write(source, tmp_path / "cache", 40, "conversations")


def test_a_beginning_that_the_model_has_no_embedding_for_is_refused(tmp_path: Path) -> None:
    model = shutil.copytree(DEMO, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.add_special_tokens({"bos_token": "<beginning>"})
    tokenizer.save_pretrained(model)
    with pytest.raises(DataError, match="vocabulary"):
        write(model, tmp_path / "cache", **SMALL)


def test_what_has_no_chat_template_or_one_of_its_own_mind_writes_documents_only(
    tmp_path: Path,
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    assert not has_chat_template(tokenizer)
    with pytest.raises(DataError, match="no chat template"):
        write(DEMO, tmp_path, 40, "conversations")
    for template, has in (
        (CHAT, True),
        ("{{ raise_exception('no') }}", False),
        ("no messages", False),
    ):
        tokenizer.chat_template = template
        assert has_chat_template(tokenizer) == has


def test_calibration_reads_it_as_it_reads_the_file(tmp_path: Path) -> None:
    plan = make_plan(open_checkpoint(str(DEMO)), 3, method="factor")
    options = {"tokens": 64, "sequence_length": 16, "device": "cpu"}
    seen: list[str] = []
    own = prepare_calibration(
        plan, CalibrationOptions("self", **options), lambda label, *_: seen.append(label)
    )
    (file,) = (tmp_path / "cache" / "gqa-convert" / "tokens").glob("own-text-*.jsonl")
    given = prepare_calibration(plan, CalibrationOptions(str(file), **options))
    assert own.digest == given.digest
    assert own.tokens == 64
    assert (
        "64 tokens of demo_checkpoint's own text (at least 81 tokens at temperature 1, seed 0)"
        in own.description
    )
    assert set(seen) == {"generating text"}
    both = prepare_calibration(plan, CalibrationOptions(["self", str(file)], **options))
    assert " and " in both.description
