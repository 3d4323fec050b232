"""Retrieval of needles: a number stated somewhere in a long text of prose is asked for at its end.

Each text contains a needle at each of five depths, `The secret number of Paris is 4821.`, for five different cities.
Behind the text stands the beginning of one of these sentences, without its number. A needle counts as found if every
token of the number is the model's likeliest, given the text and the number's tokens before; that is what greedy
decoding would write.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

LENGTHS = (512, 1024, 2048, 4096)
"""Tokens of the text with its question."""
DEPTHS = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Share of the filler that stands before the needle."""
DIGITS = 4
CITIES = ("Paris", "London", "Berlin", "Madrid", "Tokyo", "Rome", "Vienna", "Moscow", "Cairo", "Lima", "Oslo", "Dublin")
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_CHARACTERS = range(40, 400)
"""Of a sentence of the filler; shorter ones are headings and fragments."""

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Haystack:
    """A text and its questions.

    Attributes:
        text: token ids.
        questions: for each depth, the token ids behind the text that ask for the number.
        answers: for each depth, the token ids of the number.
    """

    text: list[int]
    questions: list[list[int]]
    answers: list[list[int]]


@dataclass(frozen=True)
class Retrieval:
    """Shares of needles found at one length.

    Attributes:
        needles: how many were asked for.
        found: share of all.
        found_error: standard error of the share.
        by_depth: share at each depth of `DEPTHS`.
        digits: share of the numbers' tokens that were the model's likeliest.
    """

    needles: int
    found: float
    found_error: float
    by_depth: tuple[float, ...]
    digits: float


def statement(city: str) -> str:
    return f"The secret number of {city} is"


def sentences(texts: Sequence[str]) -> list[str]:
    """The sentences of prose that can be filler."""
    found = (sentence.strip() for text in texts for sentence in _SENTENCE.split(text))
    return [sentence for sentence in found if len(sentence) in _CHARACTERS and "\n" not in sentence]


def places(sizes: Sequence[int], depths: Sequence[float]) -> list[int]:
    """For each depth, how many sentences stand before the needle: those that begin before this share of all tokens.

    Args:
        sizes: tokens of each sentence.
        depths: shares from 0 to 1.
    """
    before = [0, *accumulate(sizes)]
    return [min(range(len(before)), key=lambda count: abs(before[count] - depth * before[-1])) for depth in depths]


def make_haystack(filler: Sequence[str], length: int, encode: Encode, seed: int) -> Haystack:
    """A text of at most `length` tokens, its longest question and answer included.

    Args:
        filler: sentences; a run of them from a random one on is taken.
        length: in tokens.
        encode: text to token ids, without special tokens.
        seed: of the cities, the numbers and the filler.
    """
    chance = random.Random(seed)
    cities = chance.sample(CITIES, len(DEPTHS))
    numbers = ["".join(chance.choices("0123456789", k=DIGITS)) for _ in cities]
    needles = [f"{statement(city)} {number}." for city, number in zip(cities, numbers, strict=True)]
    questions = [encode(f"\n\n{statement(city)}") for city in cities]
    answers = [encode(f" {number}") for number in numbers]
    room = length - max(map(len, questions)) - max(map(len, answers))
    room -= sum(len(encode(f" {needle}")) for needle in needles)
    first = chance.randrange(len(filler))
    chosen: list[str] = []
    sizes: list[int] = []
    for number in range(len(filler)):
        sentence = filler[(first + number) % len(filler)]
        size = len(encode(f" {sentence}"))
        if sum(sizes) + size > room:
            break
        chosen.append(sentence)
        sizes.append(size)
    for place, needle in sorted(zip(places(sizes, DEPTHS), needles, strict=True), reverse=True):
        chosen.insert(place, needle)
    return Haystack(encode(" ".join(chosen)), questions, answers)


def matches(model: Any, haystack: Haystack) -> list[list[bool]]:
    """For each depth, whether each token of the answer is the model's likeliest. The text is read once."""
    found = []
    with torch.inference_mode():
        read = model(input_ids=torch.tensor([haystack.text]), use_cache=True, logits_to_keep=1)
        cache = read.past_key_values
        for question, answer in zip(haystack.questions, haystack.answers, strict=True):
            asked = model(input_ids=torch.tensor([question + answer]), past_key_values=cache, use_cache=True)
            likeliest = asked.logits[0, len(question) - 1 : -1].argmax(-1).tolist()
            found.append([token == wanted for token, wanted in zip(likeliest, answer, strict=True)])
            cache.crop(-len(question + answer))
    return found


def summarise(found: Sequence[Sequence[Sequence[bool]]]) -> Retrieval:
    """The shares of needles found in several haystacks; `found` is what `matches` returned for each."""
    whole = [[all(tokens) for tokens in depths] for depths in found]
    count = sum(map(len, whole))
    share = sum(map(sum, whole)) / count
    tokens = [token for depths in found for answer in depths for token in answer]
    by_depth = tuple(round(sum(column) / len(whole), 4) for column in zip(*whole, strict=True))
    return Retrieval(
        needles=count,
        found=round(share, 4),
        found_error=round((share * (1 - share) / count) ** 0.5, 4),
        by_depth=by_depth,
        digits=round(sum(tokens) / len(tokens), 4),
    )


def retrieve(
    model: Any, filler: Sequence[str], encode: Encode, lengths: Sequence[int] = LENGTHS, haystacks: int = 4
) -> dict[str, Retrieval]:
    """Retrieval at each length, over the same haystacks for every model."""
    return {
        str(length): summarise(
            [matches(model, make_haystack(filler, length, encode, seed=number)) for number in range(haystacks)]
        )
        for length in lengths
    }
