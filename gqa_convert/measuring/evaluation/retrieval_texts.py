"""Long texts that state made-up facts, and questions about them, in the tokens of any tokenizer.

A text is prose of the Python standard library's manual with two single sentences, a few key-value
records, a small table and two spans of random words or numbers in it. Behind it stands the
beginning of what was stated, whose end the text contains once. The wordings are used nowhere else
in this package, so that nothing is calibrated or trained on them.

All prompts of a text have one length and share all but their last tokens.
"""

import random
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from gqa_convert.errors import OptionError

KINDS = ("needles", "records", "tables", "copying")
PER_TEXT = 2
"""Questions of each kind that are asked about one text."""

TokenIds = list[int]
_NO_PROSE = re.compile(r"^[ *=.-]|:\Z", re.MULTILINE)
"""Matches paragraphs of lists, programs and headings, and those that introduce one."""
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_CHARACTERS = range(40, 400)
"""Of a sentence of the manual; shorter ones are headings and fragments."""


class Wording(NamedTuple):
    """How facts are stated and asked for; see retrieval.toml."""

    line: str
    ask: str
    answer: str
    head: str = ""
    lines: int = 1


_STATED = tomllib.loads(Path(__file__).with_name("retrieval.toml").read_text(encoding="utf-8"))
_WORDS: dict[str, list[str]] = {name: words.split() for name, words in _STATED["pools"].items()}
WORDINGS = {kind: [Wording(**stated) for stated in _STATED[kind]] for kind in KINDS}


@dataclass(frozen=True)
class Question:
    """A question about a text, and what a model wrote once it was asked.

    Attributes:
        kind: one of KINDS.
        length: tokens of the prompt with the room for its answer.
        text: number of the text among those of its length.
        prompt: token ids.
        answer: how a right continuation begins.
        written: the continuation of a model.
    """

    kind: str
    length: int
    text: int
    prompt: TokenIds
    answer: str
    written: str = ""

    @property
    def is_right(self) -> bool:
        """Whether the first words written are the expected ones, and nothing continues the last of
        them.
        """
        written = " ".join(self.written.split())
        rest = written.removeprefix(" ".join(self.answer.split()))
        return rest != written and not rest[:1].isalnum()


class RetrievalText(NamedTuple):
    """The questions of a text.

    Attributes:
        questions: `PER_TEXT` of each kind.
        shared: how many first tokens all prompts share.
        room: tokens to generate.
    """

    questions: list[Question]
    shared: int
    room: int


class _Facts(NamedTuple):
    """A piece of a text that states facts, and the unfinished questions about them: the end of the
    prompt, and the answer.
    """

    kind: str
    text: str
    asked: list[tuple[str, str]]


@cache
def filler() -> list[str]:
    """Sentences of the Python manual, in its order, without digits and without the words that facts
    are made of.
    """
    from pydoc_data.topics import topics

    words = "|".join(_WORDS["word"] + _WORDS["name"])
    drawn = re.compile(rf"\d|\b({words})\b", re.IGNORECASE)
    sentences: dict[str, None] = {}  # topics share passages
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            if _NO_PROSE.search(paragraph):
                continue
            for each in _SENTENCE.split(paragraph.replace("\n", " ")):
                is_sentence = len(each) in _CHARACTERS and each[-1] in ".!?"
                if is_sentence and not drawn.search(each):
                    sentences[each] = None
    return list(sentences)


def make_text(tokenizer: Any, length: int, number: int) -> RetrievalText:
    """A text and its questions. The facts depend on the length and the number alone, so that models
    with other tokenizers answer the same questions.

    Args:
        tokenizer: a transformers tokenizer.
        length: tokens of a prompt with the room for its answer.
        number: of the text.

    Raises:
        OptionError: the facts and a question take more tokens.
    """
    # facts, with the share of the prose that stands before each, and the ends of prompts
    chance = random.Random(f"0 {length} {number}")
    facts = list(_draw_facts(chance, number))
    chance.shuffle(facts)
    stated, ends = [], []
    room = 0
    for place, fact in enumerate(facts):
        # all but needles stand in paragraphs of their own
        text = fact.text if fact.kind == "needles" else f"\n\n{fact.text}\n\n"
        stated.append(((place + chance.random()) / len(facts), text))
        for ending, answer in fact.asked:
            ends.append((fact.kind, _encode(tokenizer, ending), answer))
            room = max(room, 1 + len(_encode(tokenizer, f" {answer}")))

    # what stands before them; more prose fills shorter ends, so that all prompts have one length
    first = chance.randrange(len(filler()))
    longest = max(len(end) for _, end, _ in ends)
    shared = _fill(tokenizer, stated, first, length - room - longest)
    more = _sentences(first + len(filler()) // 2, 3)
    padding = _encode(tokenizer, " ".join(["", *more]))
    questions = []
    for kind, end, answer in ends:
        prompt = shared + padding[: longest - len(end)] + end
        questions.append(Question(kind, length, number, prompt, answer))
    return RetrievalText(questions, len(shared), room)


def _draw_facts(chance: random.Random, number: int) -> Iterator[_Facts]:
    """Facts of all kinds, of which none has a part in common with another."""
    stocks: dict[str, Sequence[Any]] = _WORDS | {"number": range(10_000, 100_000)}
    pools = {}
    for name, stock in stocks.items():
        pools[name] = iter(chance.sample(stock, min(len(stock), 100)))
    for place, kind in enumerate(KINDS):
        wordings = WORDINGS[kind]
        for each in range(PER_TEXT):
            wording = wordings[(number + number // len(wordings) * place + each) % len(wordings)]
            lines = wording.head.splitlines()
            asked = []
            for _ in range(wording.lines):
                names = re.findall(r"{(\w+)}", wording.line)
                drawn = {name: next(pools[name.rstrip("2345678")]) for name in names}
                lines.append(wording.line.format(**drawn))
                asked.append(("\n\n" + wording.ask.format(**drawn), wording.answer.format(**drawn)))
            asked = chance.sample(asked, min(PER_TEXT, wording.lines))
            yield _Facts(kind, "\n".join(lines), asked)
            if len(asked) == PER_TEXT:
                break


def _fill(tokenizer: Any, stated: Sequence[tuple[float, str]], first: int, size: int) -> TokenIds:
    """The tokens of facts with prose around them.

    Args:
        tokenizer: a transformers tokenizer.
        stated: what share of the prose stands before each fact, rising, and the fact.
        first: the sentence behind the prose.
        size: tokens to return, the one that begins a text included: the beginning of the first
            sentence is cut off.

    Raises:
        OptionError: the facts take more tokens.
    """
    begin = [] if tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]
    sentences: list[str] = []
    size -= len(begin)
    while True:
        # no fact comes first
        parts = list(sentences)
        for depth, text in reversed(stated):
            parts.insert(1 + int(depth * len(sentences)), text)
        ids = _encode(tokenizer, re.sub(r" *\n\n\s*", "\n\n", " ".join(parts)))
        if len(ids) >= size:
            break
        # so few more that only the first sentence is cut
        few = max(1, (size - len(ids)) // _CHARACTERS.stop)
        sentences = _sentences(first - len(sentences) - few, few) + sentences
    if not sentences:
        raise OptionError(
            f"{size} tokens are too few for the questions, which need some 500: raise --lengths"
        )
    return begin + ids[len(ids) - size :]


def _sentences(first: int, count: int) -> list[str]:
    """Sentences of the filler from one on, behind whose last the first follows."""
    known = filler()
    return [known[number % len(known)] for number in range(first, first + count)]


def _encode(tokenizer: Any, text: str) -> TokenIds:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
