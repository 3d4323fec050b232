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
    """How facts of one kind are stated and asked for; `{key}`, `{value}` and `{other}` are drawn from pools.

    Attributes:
        line: states a fact.
        ask: stands behind the text; its continuation is the value.
        key, value: the pools of their parts.
        head: stands above the lines of a block.
        lines: facts of a block; 1 for facts that stand apart.
        joint: stands between the parts of a key or a value.
        other: the pool of what is not asked for.
    """

    line: str
    ask: str
    key: tuple[str, ...]
    value: tuple[str, ...]
    head: str = ""
    lines: int = 1
    joint: str = " "
    other: str = "word"


_WORD, _NAME, _TOWN, _NUMBER = ("word",), ("name",), ("town",), ("number",)
WORDINGS: dict[str, tuple[Wording, ...]] = {
    "needles": (
        Wording(
            "The gate of {key} opens with the code {value}.",
            "Question: Which code opens the gate of {key}?\nAnswer: The gate opens with the code",
            _TOWN,
            _NUMBER,
        ),
        Wording(
            "As a child, {key} lived in the small town of {value}.",
            "Question: Where did {key} live as a child?\nAnswer: In the town of",
            _NAME,
            _TOWN,
        ),
        Wording(
            "Please note that {key} hid the spare key behind the {value}.",
            "Question: Where is the spare key that {key} hid?\nAnswer: Behind the",
            _NAME,
            _WORD,
        ),
    ),
    "records": (
        Wording(
            '{{"user": "{key}", "pin": {value}}}',
            'The same entry as above:\n\n{{"user": "{key}", "pin":',
            _NAME,
            _NUMBER,
            "Registered users:",
            6,
        ),
        Wording("{key}_port = {value}", "{key}_port =", _WORD, _NUMBER, "[ports]", 6),
        Wording("room {key}: reserved for {value}", "room {key}: reserved for", _WORD, _NAME, "Bookings", 6),
    ),
    "tables": (
        Wording(
            "| {key} | {value} | {other} |",
            "The row of {key} again:\n\n| {key} |",
            _NAME,
            _NUMBER,
            "| driver | points | team |\n|---|---|---|",
            5,
        ),
        Wording(
            "{key},{value},{other}",
            "borrower,item,shelf\n{key},",
            _NAME,
            _WORD,
            "borrower,item,shelf",
            5,
        ),
        Wording(
            "<tr><td>{key}</td><td>{value}</td><td>{other}</td></tr>",
            "<tr><td>{key}</td><td>",
            _WORD,
            _TOWN,
            "<table>",
            4,
            other="name",
        ),
    ),
    "copying": (
        Wording("{key} {value} {other}", "{key}", _WORD * 4, _WORD * 3),
        Wording("Stops: {key}, {value}, {other}.", "Stops: {key},", _TOWN * 2, _TOWN * 2, joint=", ", other="town"),
        Wording("Serial {key}-{value}-{other}", "Serial {key}-", _NUMBER, _NUMBER * 2, joint="-", other="number"),
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
    key = wording.joint.join(str(next(pools[name])) for name in wording.key)
    value = wording.joint.join(str(next(pools[name])) for name in wording.value)
    other = next(pools[wording.other])
    return wording.line.format(key=key, value=value, other=other), (wording.ask.format(key=key, other=other), value)


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
