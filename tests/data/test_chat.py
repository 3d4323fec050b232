"""Conversations against the chat template itself: their tokens, which of them are learned, and where they end."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gqa_convert.conversion.fit.calibration_text import calibration_batches
from gqa_convert.data.hub import HubDataset
from gqa_convert.data.labels import IGNORED
from gqa_convert.errors import DataError
from tests.helpers.data_helpers import demo_tokenizer, evaluation_blocks
from tests.helpers.uptrain_runs import DEMO

PLAIN = (
    "{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}[{{ m['role'] }}]\n{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{{ eos_token }}\n"
    "{% endgeneration %}{% else %}{{ m['content'] }}{{ eos_token }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
FORGETFUL = "{% for m in messages %}[{{ m['role'] }}]{% if m['role'] != 'assistant' or loop.last %}{{ m['content'] }}{% endif %}{% endfor %}"
"""Renders only the last answer, as templates that drop earlier reasoning do."""
STRICT = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('the user speaks first') }}{% endif %}" + PLAIN
TEXTS = ["def f(x):", "  return x + 1", "why?", "because of the sum.", "class A:\n    pass", "ünïcode 🙂 text"]
LENGTH = 16


def said(*texts: str) -> list[dict[str, str]]:
    """A conversation in which user and assistant take turns."""
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


CHATS = [
    said(*TEXTS[:2]),
    said(*TEXTS[2:6]),
    [{"role": "system", "content": "Be brief."}, *said(TEXTS[0], TEXTS[5])],
    said(TEXTS[4]),
    said(*TEXTS[:4], *TEXTS[2:4]),
] * 3


def tokenizer_with(template: str | None) -> Any:
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def rows_file(folder: Path, rows: list[Any], name: str = "chats.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    return rows_file(tmp_path, [{"messages": chat} for chat in CHATS])


def rendered(tokenizer: Any) -> tuple[list[int], list[bool], list[int]]:
    """The tokens of all conversations by the template, whether each is the assistant's, and the number of the
    conversation of each. The assistant's are those of the tag, or else found by rendering up to each of its turns.
    """
    ids, assistant, numbers = list[int](), list[bool](), list[int]()
    for number, chat in enumerate(CHATS):
        whole = tokenizer.apply_chat_template(chat, return_dict=False)
        mask = [False] * len(whole)
        if tokenizer.chat_template == MARKED:
            both = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
            mask = [value == 1 for value in both["assistant_masks"]]
        for turn, message in enumerate(chat if tokenizer.chat_template == PLAIN else ()):
            if message["role"] == "assistant":
                first = len(tokenizer.apply_chat_template(chat[:turn], add_generation_prompt=True, return_dict=False))
                last = len(tokenizer.apply_chat_template(chat[: turn + 1], return_dict=False))
                mask[first:last] = [True] * (last - first)
        ids += whole
        assistant += mask
        numbers += [number] * len(whole)
    return ids, assistant, numbers


def packed(source: Any, tokenizer: Any, cache: Path) -> dict[str, np.ndarray[Any, Any]]:
    """All blocks of a source, in the order of the text."""
    blocks = evaluation_blocks(
        [source],
        tokenizer,
        objective="causal",
        sequence_length=LENGTH,
        tokens=10**6,
        cache=cache,
    )
    return blocks.batch(range(len(blocks)))


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["rendered by turns", "with generation tags"])
@pytest.mark.parametrize("loss_on", ["assistant", "all"])
def test_tokens_and_learned_tokens_are_those_of_the_template(
    template: str, loss_on: str, chats: Path, tmp_path: Path
) -> None:
    tokenizer = tokenizer_with(template)
    ids, assistant, _ = rendered(tokenizer)
    batch = packed({"source": str(chats), "format": "chat", "loss_on": loss_on}, tokenizer, tmp_path / "cache")
    count = len(ids) - 1
    np.testing.assert_array_equal(batch["input_ids"].flatten()[:count], ids[:-1])
    learned = np.array(assistant[1:]) if loss_on == "assistant" else np.ones(count, bool)
    assert 0 < learned.sum() <= count
    np.testing.assert_array_equal(batch["labels"].flatten()[:count], np.where(learned, ids[1:], IGNORED))


def test_other_forms_of_rows_give_the_same_samples(
    chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of Parquet files, which fill in nulls; `from` and `value`; another field; a stream; and detection."""
    monkeypatch.setattr("gqa_convert.data.sources.commit_of", lambda *_: "0" * 40)
    monkeypatch.setattr(HubDataset, "open_rows", lambda _: [{"messages": chat} for chat in CHATS])
    senders = {"user": "human", "assistant": "gpt", "system": "system"}
    turns = [[{"from": senders[m["role"]], "value": m["content"]} for m in chat] for chat in CHATS]
    shared = rows_file(tmp_path, [{"id": 1, "conversations": chat} for chat in turns], "shared.jsonl")
    filled = [{"messages": [message | {"name": None} for message in chat]} for chat in CHATS]
    pq.write_table(pa.Table.from_pylist(filled), tmp_path / "chats.parquet")
    tokenizer = tokenizer_with(PLAIN)
    expected = packed({"source": str(chats), "format": "chat"}, tokenizer, tmp_path / "cache")
    for source in (
        str(chats),
        str(tmp_path / "chats.parquet"),
        {"source": str(shared), "messages_field": "conversations"},
        {"source": "org/some", "format": "chat"},
    ):
        found = packed(source, tokenizer, tmp_path / "cache")
        assert all((found[name] == expected[name]).all() for name in expected)


def test_calibration_renders_conversations(chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gqa_convert.data.model_tokenizer.load_tokenizer", lambda _: tokenizer_with(PLAIN))
    ids, _, _ = rendered(tokenizer_with(PLAIN))
    found = calibration_batches(DEMO, str(chats), 10**6, seed=0, sequence_length=LENGTH)
    blocks = sorted(tuple(row) for batch in found.batches for row in batch["input_ids"].tolist())
    cut = [tuple(ids[at : at + LENGTH]) for at in range(0, len(ids), LENGTH)]
    assert blocks == sorted(block for block in cut if len(block) > 1)


@pytest.mark.parametrize(
    ("template", "rows", "message"),
    [
        (None, [{"messages": CHATS[0]}], "no chat template"),
        (
            FORGETFUL,
            [{"messages": CHATS[1]}],
            "renders a conversation differently once later messages follow message 2",
        ),
        (STRICT, [{"messages": said(*TEXTS[:2])[::-1]}], "line 1: the chat template refuses.*user speaks first"),
        (PLAIN, [{"messages": CHATS[0]}, {"text": "x"}], "line 2 has no 'messages', found text"),
        (PLAIN, [{"messages": "hello"}], "line 1: 'messages' holds a str"),
        (PLAIN, [{"messages": ["hello"]}], "message 1 is a str"),
        (PLAIN, [{"messages": [{"content": "x"}]}], "message 1 has no `role`, found content"),
        (PLAIN, [{"messages": [{"role": "user"}]}], "message 1 of the role user has no `content`"),
        (PLAIN, [{"messages": []}], "holds no text"),
        (PLAIN, [{"messages": said(TEXTS[0])}] * 9, "no message of the assistant"),
    ],
)
def test_conversations_that_cannot_be_used(template: str | None, rows: list[Any], message: str, tmp_path: Path) -> None:
    path = rows_file(tmp_path, rows)
    with pytest.raises(DataError, match=message) as refused:
        packed({"source": str(path), "format": "chat"}, tokenizer_with(template), tmp_path / "cache")
    assert "\n" not in str(refused.value)


def test_a_prompt_and_its_response(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(PLAIN)
    pairs = [(TEXTS[0], TEXTS[1]), (TEXTS[2], TEXTS[3])] * 10
    messages = rows_file(tmp_path, [{"messages": said(*pair)} for pair in pairs])
    columns = rows_file(tmp_path, [{"instruction": one, "output": other} for one, other in pairs], "columns.jsonl")
    source = {"source": str(columns), "format": "chat", "source_field": "instruction", "target_field": "output"}
    expected, found = (packed(each, tokenizer, tmp_path / "cache") for each in (str(messages), source))
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])
