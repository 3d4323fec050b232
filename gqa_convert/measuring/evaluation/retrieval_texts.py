"""Long texts that state made-up facts, and questions about them, in the tokens of any tokenizer.

A text is prose of the Python standard library's manual with two single sentences, a few key-value records, a small table
and two spans of random words in it. Behind it stands the beginning of what was stated, whose end the text contains once.
The wordings are used nowhere else in this package, so that nothing is calibrated or trained on them.

All prompts of a text have one length and share all but their last tokens.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from string import Formatter
from typing import Any, NamedTuple

from gqa_convert.errors import OptionError

KINDS = ("needles", "records", "tables", "copying")
PER_TEXT = 2
"""Questions of each kind that are asked about one text."""

_WORDS = """
    anchor apricot badger ballad bamboo barley basil beaver blanket blossom bonnet butter cactus camel candle canoe carpet
    castle cedar cellar cherry chimney cinnamon clover cobalt copper coral cottage cotton cricket dagger daisy dolphin
    donkey dragon eagle ember falcon feather fiddle forest fountain garlic ginger glacier goblet granite hammer harvest
    hazel heron honey island ivory jacket jasmine kettle kitten ladder lantern lemon lily lobster magnet mango maple marble
    meadow mirror monkey mustard nectar nutmeg olive orchid otter paddle parrot pebble pepper pigeon pillow pirate planet
    poppy prairie pumpkin rabbit raven ribbon river rocket saddle salmon sandal satin shovel silver sparrow spider squirrel
    statue sugar sunset teapot temple thunder tiger timber tulip turtle valley velvet violet violin walnut whistle willow
    winter
"""
_NAMES = """
    Agnes Albert Amelia Arthur Beatrice Bernard Carla Cedric Clara Conrad Daphne Dennis Edgar Elena Esther Felix Fiona
    Gerald Gloria Harold Helena Hugo Irene Isaac Jasper Judith Karen Lionel Lucy Martha Martin Monica Nathan Nora Oscar
    Pamela Percy Ralph Rosa Rupert Sylvia Teresa Ursula Victor Walter Wilma
"""
_TOWNS = [
    first + last
    for first in ("Ald", "Bren", "Cor", "Dun", "Fen", "Hal", "Kel", "Mor", "Nor", "Pel", "Rav", "Sel", "Tor", "Wen")
    for last in ("bury", "cester", "dale", "ford", "ham", "holm", "mouth", "stead", "wick", "worth")
]
_POOLS: dict[str, Sequence[Any]] = {
    "word": _WORDS.split(),
    "name": _NAMES.split(),
    "town": _TOWNS,
    "number": range(10_000, 100_000),
}
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_CHARACTERS = range(40, 400)
"""Of a sentence of the manual; shorter ones are headings and fragments."""


class Wording(NamedTuple):
    """How facts of one kind are stated and asked for. `{town}` and `{town2}` are two draws from the pool of towns.

    Attributes:
        line: states a fact.
        ask: stands behind the text.
        answer: continues it.
        head: stands above the lines of a block.
        lines: facts of a block; 1 for facts that stand apart.
    """

    line: str
    ask: str
    answer: str
    head: str = ""
    lines: int = 1


WORDINGS: dict[str, tuple[Wording, ...]] = {
    "needles": (
        Wording(
            "The gate of {town} opens with the number {number}.",
            "Question: Which number opens the gate of {town}?\nAnswer: The gate opens with the number",
            "{number}",
        ),
        Wording(
            "As a child, {name} lived in the small town of {town}.",
            "Question: Where did {name} live as a child?\nAnswer: In the town of",
            "{town}",
        ),
        Wording(
            "Please note that {name} hid the spare key under the {word}.",
            "Question: Where is the spare key that {name} hid?\nAnswer: Under the",
            "{word}",
        ),
    ),
    "records": (
        Wording(
            '{{"user": "{name}", "pin": {number}}}',
            'The same entry as above:\n\n{{"user": "{name}", "pin":',
            "{number}",
            "Registered users:",
            6,
        ),
        Wording("{word}_port = {number}", "{word}_port =", "{number}", "[ports]", 6),
        Wording("room {word}: reserved for {name}", "room {word}: reserved for", "{name}", "Bookings", 6),
    ),
    "tables": (
        Wording(
            "| {name} | {number} | {word} |",
            "The row of {name} again:\n\n| {name} |",
            "{number}",
            "| driver | points | team |\n|---|---|---|",
            5,
        ),
        Wording("{name},{word},{word2}", "borrower,item,shelf\n{name},", "{word}", "borrower,item,shelf", 5),
        Wording(
            "<tr><td>{word}</td><td>{town}</td><td>{name}</td></tr>", "<tr><td>{word}</td><td>", "{town}", "<table>", 4
        ),
    ),
    "copying": (
        Wording(
            "{word} {word2} {word3} {word4} {word5} {word6} {word7} {word8}",
            "{word} {word2} {word3} {word4}",
            "{word5} {word6} {word7}",
        ),
        Wording("Stops: {town}, {town2}, {town3}, {town4}, {town5}.", "Stops: {town}, {town2},", "{town3}, {town4}"),
        Wording("Serial {number}-{number2}-{number3}-{number4}", "Serial {number}-", "{number2}-{number3}"),
    ),
}


@dataclass(frozen=True)
class Question:
    """A question about a text.

    Attributes:
        kind: one of KINDS.
        wording: its number among the wordings of the kind.
        depth: share of the text that stands before the fact.
        prompt: token ids.
        answer: how a right continuation begins.
    """

    kind: str
    wording: int
    depth: float
    prompt: list[int]
    answer: str


@dataclass(frozen=True)
class RetrievalText:
    """The questions of a text.

    Attributes:
        length: tokens of each prompt with the room for its answer.
        number: of the text among those of its length.
        questions: `PER_TEXT` of each kind.
        shared: how many first tokens all prompts share.
        room: tokens to generate.
    """

    length: int
    number: int
    questions: list[Question]
    shared: int
    room: int


@dataclass
class _Facts:
    """A piece of a text that states facts, and the unfinished questions about them: the end of the prompt, and the answer."""

    kind: str
    wording: int
    text: str
    asked: list[tuple[str, str]] = field(default_factory=list)


@cache
def filler() -> list[str]:
    """Sentences of the Python manual, in its order, without digits and without the words that facts are made of."""
    from pydoc_data.topics import topics

    drawn = re.compile(r"\d|\b(" + "|".join([*_POOLS["word"], *_POOLS["name"]]) + r")\b", re.IGNORECASE)
    found: list[str] = []
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            lines = paragraph.split("\n")
            if any(line[:1] in (" ", "*", "-", "=", ".") for line in lines) or paragraph.endswith(":"):
                continue
            found += _SENTENCE.split(" ".join(lines))
    found = list(dict.fromkeys(found))  # topics share passages
    return [each for each in found if len(each) in _CHARACTERS and each[-1] in ".!?" and not drawn.search(each)]


def make_text(tokenizer: Any, length: int, number: int, seed: int) -> RetrievalText:
    """A text and its questions. The facts depend on the length, the number and the seed alone, so that models with other
    tokenizers answer the same questions.

    Args:
        tokenizer: a transformers tokenizer.
        length: tokens of a prompt with the room for its answer.
        number: of the text.
        seed: of what is drawn.

    Raises:
        OptionError: the facts and a question take more tokens.
    """
    chance = random.Random(f"{seed} {length} {number}")
    facts = list(_draw_facts(chance, number))
    chance.shuffle(facts)
    shares = [(place + chance.random()) / len(facts) for place in range(len(facts))]
    first = chance.randrange(len(filler()))

    asked = [(fact, share, *question) for fact, share in zip(facts, shares, strict=True) for question in fact.asked]
    endings = [_encode(tokenizer, "\n\n" + ending) for *_, ending, _ in asked]
    longest = max(map(len, endings))
    room = max(len(_encode(tokenizer, " " + answer)) for *_, answer in asked) + 1
    begin = [] if tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]
    shared = begin + _fill(tokenizer, facts, shares, first, length - room - longest - len(begin))

    apart = first + len(filler()) // 2
    padding = _encode(tokenizer, " " + " ".join(_sentence(apart + number) for number in range(3)))
    questions = []
    for (fact, share, _, answer), ending in zip(asked, endings, strict=True):
        prompt = shared + padding[: longest - len(ending)] + ending
        questions.append(Question(fact.kind, fact.wording, share, prompt, answer))
    return RetrievalText(length, number, questions, len(shared), room)


def text_beginnings(tokenizer: Any, count: int, size: int, seed: int) -> list[list[int]]:
    """The first tokens of so many texts of prose, of one size each."""
    begin = [] if tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]
    starts = random.Random(seed).sample(range(len(filler())), count)
    texts = [" ".join(_sentence(start + number) for number in range(size // 8)) for start in starts]
    return [(begin + _encode(tokenizer, text))[:size] for text in texts]


def _draw_facts(chance: random.Random, number: int) -> Iterator[_Facts]:
    """Facts of all kinds, of which none has a part in common with another."""
    pools = {name: iter(chance.sample(pool, min(len(pool), 100))) for name, pool in _POOLS.items()}
    for place, kind in enumerate(KINDS):
        wordings = WORDINGS[kind]
        for each in range(PER_TEXT):
            chosen = (number + number // len(wordings) * place + each) % len(wordings)
            wording = wordings[chosen]
            drawn = [_draw(wording, pools) for _ in range(wording.lines)]
            text = "\n".join([*wording.head.splitlines(), *(line for line, _ in drawn)])
            asked = chance.sample([question for _, question in drawn], min(PER_TEXT, wording.lines))
            yield _Facts(kind, chosen, text, asked)
            if len(asked) == PER_TEXT:
                break


def _draw(wording: Wording, pools: Mapping[str, Iterator[Any]]) -> tuple[str, tuple[str, str]]:
    """A fact: its line, and the end of the prompt that asks for it with the answer."""
    names = [name for _, name, _, _ in Formatter().parse(wording.line) if name]
    drawn = {name: next(pools[name.rstrip("2345678")]) for name in names}
    return wording.line.format(**drawn), (wording.ask.format(**drawn), wording.answer.format(**drawn))


def _fill(tokenizer: Any, facts: Sequence[_Facts], shares: Sequence[float], first: int, size: int) -> list[int]:
    """The tokens of facts with prose around them.

    Args:
        tokenizer: a transformers tokenizer.
        facts: what to state, in order.
        shares: of the prose that stands before each.
        first: sentence of the prose.
        size: tokens to return: the beginning of the first sentence is cut off.

    Raises:
        OptionError: the facts take more tokens.
    """
    sentences: list[str] = []
    left = size - len(_encode(tokenizer, _assemble(facts, shares, [])))
    while (left := left - len(_encode(tokenizer, " " + _sentence(first + len(sentences))))) >= 0:
        sentences.append(_sentence(first + len(sentences)))
    while len(_encode(tokenizer, _assemble(facts, shares, sentences))) > size and sentences:
        sentences.pop()
    if not sentences:
        raise OptionError("a length is too short for the questions, which need some 500 tokens: raise --lengths")
    text = _assemble(facts, shares, sentences)
    while len(ids := _encode(tokenizer, text)) < size:
        first -= 1
        text = f"{_sentence(first)} {text}"
    return ids[len(ids) - size :]


def _assemble(facts: Sequence[_Facts], shares: Sequence[float], sentences: Sequence[str]) -> str:
    """Prose with facts in it, of which none comes first; all but needles stand in paragraphs of their own."""
    parts = list(sentences)
    for fact, share in reversed(list(zip(facts, shares, strict=True))):
        text = fact.text if fact.kind == "needles" else f"\n\n{fact.text}\n\n"
        parts.insert(1 + int(share * len(sentences)), text)
    return re.sub(r" *\n\n\s*", "\n\n", " ".join(parts))


def _sentence(number: int) -> str:
    return filler()[number % len(filler())]


def _encode(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return found
