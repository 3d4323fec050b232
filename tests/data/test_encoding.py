"""What a text's tokens are: no special tokens from raw text, dates of chat templates, the
beginning of text.
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import processors

from gqa_convert.conversion.calibration.own_text import _chat_turns
from gqa_convert.data import model_tokenizer
from gqa_convert.data.encoders import LAST, ChatEncoder, PairEncoder, TextEncoder, ids_of
from gqa_convert.data.files import Fields, Piece
from gqa_convert.data.model_tokenizer import beginning_of_text
from gqa_convert.measuring.evaluation.examples import Document, encode, text_material
from tests.helpers.calibrations import calibration_batches
from tests.helpers.data_helpers import DEMO, demo_tokenizer, span_tokenizer

MESSAGES = [{"role": "user", "content": "why?"}]
DATED = (
    "\n{% if strftime_now is defined %}{% set date = strftime_now('%d %b %Y (%-d.%-m.%y, "
    "%A)') %}{% endif %}\n\n"
    "{{ date }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
)


def slow_tokenizer() -> Any:
    tokenizer = transformers.ByT5Tokenizer()
    assert not tokenizer.is_fast
    return tokenizer


@pytest.mark.parametrize("make", [demo_tokenizer, slow_tokenizer])
def test_special_tokens_in_raw_text_are_text(make: Any) -> None:
    tokenizer = make()
    eos = tokenizer.eos_token
    text = f"a {eos} b{eos}"
    assert tokenizer.eos_token_id in tokenizer(text, add_special_tokens=False)["input_ids"]
    encoder = TextEncoder(tokenizer, Fields(), closed=True)
    marked = encoder.encode([Piece(text)])
    *ids, end = ids_of(marked).tolist()
    assert (end, tokenizer.eos_token_id in ids) == (tokenizer.eos_token_id, False)
    assert tokenizer.decode(ids) == text
    pairs = PairEncoder(tokenizer, Fields(("a", "b"), "pair")).encode([Piece((text, text))])
    assert ids_of(pairs).tolist().count(tokenizer.eos_token_id) == (pairs >= LAST).sum() - (
        make is demo_tokenizer
    )
    found, sizes = encode(tokenizer, text)
    assert found.tolist() == ids
    assert sizes.sum() == len(text.encode())
    # nor does reading raw text change what the tokenizer does elsewhere
    assert tokenizer.eos_token_id in tokenizer(text, add_special_tokens=False)["input_ids"]
    assert TextEncoder(tokenizer, Fields(), closed=True).key == encoder.key


def test_special_tokens_of_a_chat_template_stay_special() -> None:
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    ids = ids_of(ChatEncoder(tokenizer).encode([Piece(MESSAGES)])).tolist()
    assert ids == [*tokenizer("why?")["input_ids"], tokenizer.eos_token_id]


def test_dates_in_chat_templates_are_pinned_and_part_of_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime(2031, 1, 2, tzinfo=tz)

    def made() -> tuple[str, list[Any], list[int]]:
        encoder = ChatEncoder(tokenizer)
        piece = Piece(MESSAGES)
        return encoder.rendered(piece).text, encoder.key, encoder.encode([piece]).tolist()

    tokenizer = demo_tokenizer()
    tokenizer.chat_template = DATED
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Later)
    assert "2031" in str(tokenizer.apply_chat_template(MESSAGES, tokenize=False))
    first = made()
    assert first[0] == "\n\n26 Jul 2024 (26.7.24, Friday)why?<|endoftext|>"
    monkeypatch.undo()
    assert made() == first
    monkeypatch.setattr(model_tokenizer, "DATE", datetime(2031, 1, 2))
    other = made()
    assert "02 Jan 2031 (2.1.31, Thursday)" in other[0]
    assert other[1] != first[1]


def test_dates_in_the_beginning_of_own_conversations_are_pinned() -> None:
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = DATED
    opening, _ = _chat_turns(tokenizer) or ([], [])
    assert tokenizer.decode(opening) == "\n\n26 Jul 2024 (26.7.24, Friday)"


def with_beginning() -> Any:
    tokenizer = span_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


def test_windows_of_evaluation_begin_as_every_text_does() -> None:
    """Every token is scored once, and each window begins with the beginning of text."""
    tokenizer = with_beginning()
    bos = tokenizer.bos_token_id
    assert beginning_of_text(tokenizer) == [bos]
    words = list(range(1, 12))
    text = " ".join(f"w{number}" for number in words)
    material = text_material([Document(*encode(tokenizer, text))], tokenizer, window=4)
    windows = sorted(material.examples, key=lambda each: int(each.targets[0]))
    assert [each.inputs["input_ids"].tolist()[0] for each in windows] == [bos] * len(windows)
    assert all(len(each.inputs["input_ids"]) <= 4 for each in windows)
    assert [token - 3 for each in windows for token in each.targets.tolist()] == words
    for each in windows:
        read, targets = each.inputs["input_ids"].tolist(), each.targets.tolist()
        assert read[-len(targets) + 1 :] == targets[:-1] or len(targets) == 1
        assert targets[0] == 4 or read[-len(targets)] == targets[0] - 1
    plain = span_tokenizer()
    assert beginning_of_text(plain) == []
    (first, *_) = sorted(
        text_material([Document(*encode(plain, text))], plain, window=4).examples,
        key=lambda each: int(each.targets[0]),
    )
    assert first.inputs["input_ids"].tolist() == [4, 5, 6, 7]


def demo_with_beginning() -> Any:
    tokenizer = demo_tokenizer()
    tokenizer.bos_token = "<|pad|>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|pad|> $A", special_tokens=[("<|pad|>", tokenizer.bos_token_id)]
    )
    return tokenizer


@pytest.mark.parametrize("adds", [True, False])
def test_blocks_of_calibration_begin_as_every_text_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adds: bool
) -> None:
    tokenizer = demo_with_beginning() if adds else demo_tokenizer()
    monkeypatch.setattr("gqa_convert.data.model_tokenizer.load_tokenizer", lambda _: tokenizer)
    texts = [
        " ".join(f"word{number}" for number in range(begin, begin + 40)) for begin in (0, 40, 80)
    ]
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    found = calibration_batches(
        DEMO, str(tmp_path / "texts.jsonl"), 10**6, seed=0, sequence_length=32
    )
    blocks = [row for batch in found.batches for row in batch["input_ids"].tolist()]
    begin = [tokenizer.bos_token_id] if adds else []
    ids: list[int] = []
    for text in texts:
        ids += [
            *begin,
            *tokenizer(text, add_special_tokens=False)["input_ids"],
            tokenizer.eos_token_id,
        ]
    cut = [ids[at : at + 32] for at in range(0, len(ids), 32)]
    expected = [
        block if not begin or block[:1] == begin else [*begin, *block[:-1]] for block in cut
    ]
    assert sorted(blocks) == sorted(block for block in expected if len(block) > 1)
    assert sum(block == other for block, other in zip(expected, cut, strict=True)) == (
        1 if adds else len(cut)
    )
