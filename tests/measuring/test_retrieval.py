"""Retrieval: what prompts hold, what counts as an answer, and what models that copy or can't copy
find.
"""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, MambaConfig, MambaForCausalLM

from gqa_convert.errors import OptionError
from gqa_convert.measuring.evaluation.retrieval import ask, continuations, share_found, shares
from gqa_convert.measuring.evaluation.retrieval_texts import (
    KINDS,
    PER_TEXT,
    WORDINGS,
    Question,
    make_text,
)
from tests.helpers.data_helpers import demo_tokenizer
from tests.helpers.tiny import make_config, make_model


class Copying:
    """A model that continues like the longest earlier passage that ends as the text does, within
    the last `sees` tokens.
    """

    device = torch.device("cpu")

    def __init__(self, sees: int) -> None:
        self._sees = sees
        self.generation_config = GenerationConfig(repetition_penalty=2.0)

    def generate(self, rows: torch.Tensor, *, max_new_tokens: int, **given: Any) -> Any:
        assert self.generation_config.repetition_penalty is None
        assert given["attention_mask"].all()
        written = [self._written(row, max_new_tokens) for row in rows.tolist()]
        return SimpleNamespace(sequences=torch.tensor(written), past_key_values=None)

    def forward(self, past_key_values: None) -> None:
        """As transformers names the cache."""

    def _written(self, row: list[int], count: int) -> list[int]:
        row = list(row)
        for _ in range(count):
            seen = row[-self._sees :]
            ends = [end for end in range(len(seen) - 1) if seen[end] == seen[-1]]
            row.append(
                seen[max(ends, key=lambda end: self._match(seen, end)) + 1] if ends else row[-1]
            )
        return row

    def _match(self, seen: list[int], end: int) -> int:
        length = 0
        while length <= end and seen[end - length] == seen[len(seen) - 1 - length]:
            length += 1
        return length


def answer(expected: str, written: str, length: int = 512, text: int = 0) -> Question:
    return Question("needles", length, text, [], expected, written)


def depth(tokenizer: Any, question: Question) -> float:
    """What share of a prompt stands before the fact."""
    prompt = tokenizer.decode(question.prompt)
    return float(prompt.index(question.answer) / len(prompt))


def asked_by(kind: str, ending: str) -> list[str]:
    """The wordings with which a prompt may end so."""
    found = []
    for wording in WORDINGS[kind]:
        parts = map(
            re.escape, re.split(r"{\w+}", wording.ask.replace("{{", "{").replace("}}", "}"))
        )
        if re.search(r"\S+".join(parts) + r"\Z", ending):
            found.append(wording.ask)
    return found


@pytest.mark.parametrize("length", [512, 777, 1300])
def test_prompts_have_their_length_and_contain_each_answer_once(length: int) -> None:
    tokenizer = demo_tokenizer()
    wordings, depths = set(), []
    for number in range(9):
        text = make_text(tokenizer, length, number)
        assert [sum(each.kind == kind for each in text.questions) for kind in KINDS] == [
            PER_TEXT
        ] * len(KINDS)
        for question in text.questions:
            assert len(question.prompt) + text.room == length
            assert question.prompt[: text.shared] == text.questions[0].prompt[: text.shared]
            assert question.prompt[0] == tokenizer.bos_token_id
            prompt = tokenizer.decode(question.prompt)
            assert prompt.count(question.answer) == 1
            assert question.answer not in tokenizer.decode(question.prompt[text.shared :])
            assert len(tokenizer(" " + question.answer)["input_ids"]) < text.room
            depths.append(depth(tokenizer, question))
            ending = tokenizer.decode(question.prompt[text.shared :])
            wordings.update((question.kind, words) for words in asked_by(question.kind, ending))
    assert wordings == {(kind, each.ask) for kind in KINDS for each in WORDINGS[kind]}
    assert min(depths) < 0.2
    assert max(depths) > 0.8


def test_texts_differ_by_number_and_length_and_not_by_tokenizer() -> None:
    tokenizer = demo_tokenizer()
    texts = [make_text(tokenizer, *each) for each in ((600, 0), (600, 1), (700, 0), (600, 0))]
    prompts = [text.questions[0].prompt for text in texts]
    assert prompts[0] == prompts[3]
    assert len({tuple(prompt) for prompt in prompts}) == 3
    spelled = make_text(Characters(), 3000, 5)
    known = make_text(tokenizer, 3000, 5)
    assert [each.answer for each in spelled.questions] == [each.answer for each in known.questions]
    assert {len(each.prompt) for each in spelled.questions} == {3000 - spelled.room}


class Characters:
    """A tokenizer whose tokens are characters, without a token that begins a text."""

    bos_token_id = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}


def test_a_text_that_is_too_short_for_its_questions_is_refused() -> None:
    with pytest.raises(OptionError, match="raise --lengths"):
        make_text(demo_tokenizer(), 300, 0)


def test_a_model_that_copies_finds_what_it_sees() -> None:
    tokenizer = demo_tokenizer()
    model = Copying(600)
    answers = ask(model, tokenizer, [600], questions=6)
    assert model.generation_config.repetition_penalty == 2.0, "the model's own settings come back"
    assert len(answers) == 6 * len(KINDS)
    found = {
        kind: share_found([each for each in answers if each.kind == kind]).value for kind in KINDS
    }
    assert all(share is not None and share > 0.9 for share in found.values()), found
    near = ask(Copying(250), tokenizer, [600], questions=6)
    late, early = (
        share_found([each for each in near if (depth(tokenizer, each) > 0.5) == end]).value
        for end in (True, False)
    )
    assert (late or 0.0) > (early or 0.0) + 0.5


@pytest.mark.parametrize(
    ("expected", "written", "is_right"),
    [
        ("4821", " 4821.", True),
        ("4821", " 48213", False),
        ("4821", " the 4821", False),
        ("teapot", " teapots", False),
        ("a b", " a  b c", True),
        ("A", " a", False),
    ],
)
def test_an_answer_is_right_if_its_first_words_are(
    expected: str, written: str, is_right: bool
) -> None:
    assert answer(expected, written).is_right is is_right


def test_standard_errors_are_over_texts() -> None:
    right, wrong = ("1", "1"), ("1", "2")
    answers = [
        answer(*right),
        answer(*right),
        answer(*right, text=1),
        answer(*wrong, text=1),
        answer(*wrong, length=9),
    ]
    found = share_found(answers)
    assert found.value == pytest.approx(3 / 5)
    # texts hold 2, 2 and 1 questions, of which 2, 1 and 0 are right: deviations 0.8, -0.2 and -0.6
    assert found.error == pytest.approx((3 / 2 * (0.8**2 + 0.2**2 + 0.6**2)) ** 0.5 / 5)


@pytest.mark.parametrize("written", ["1", "2"])
def test_a_share_of_all_or_none_has_an_error(written: str) -> None:
    """That end of Wilson's score interval for 6 trials at z = 1, which is 1 of 7 away."""
    texts = [
        replace(answer("1", written, text=number), kind=kind)
        for number in range(6)
        for kind in KINDS
    ]
    whole, *_ = shares(texts, [replace(each, written="1") for each in texts])
    share = float(written == "1")
    assert (whole.questions, whole.found, whole.difference) == (24, share, share - 1)
    trials, z = 6, 1.0
    centre = (share + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = z / (1 + z**2 / trials) * (z**2 / (4 * trials**2)) ** 0.5
    other_end = centre - half if share else centre + half
    assert whole.found_standard_error == pytest.approx(abs(share - other_end))
    assert whole.difference_standard_error == whole.found_standard_error


@pytest.mark.parametrize("batch", [3])
@pytest.mark.parametrize("kind", ["llama", "mistral", "mamba"])
def test_a_shared_cache_changes_nothing(kind: str, batch: int) -> None:
    tokenizer = demo_tokenizer()
    if kind != "mamba":
        window = {"sliding_window": 100} if kind == "mistral" else {}
        sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 600}
        model: Any = make_model(make_config(kind, **sizes, **window))
    else:
        torch.manual_seed(0)
        model = MambaForCausalLM(
            MambaConfig(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2)
        ).eval()
    text = make_text(tokenizer, 520, 0)
    model.generation_config = GenerationConfig(pad_token_id=0)
    reads: list[int] = []
    model.register_forward_pre_hook(
        lambda _, positional, given: reads.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    written = continuations(model, text, batch)
    shares = [read for read in reads if 1 < read < text.shared]
    assert bool(shares) == (kind != "mamba")
    for question, found in zip(text.questions, written, strict=True):
        prompt = torch.tensor([question.prompt])
        whole = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=text.room
        )
        assert found.tolist() == whole[0, len(question.prompt) :].tolist()
