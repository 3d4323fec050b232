"""Two tasks made from held-out prose, scored as lm-eval scores its tasks.

- continuation: 128 tokens of a document, and four continuations of 16 tokens from the same document, of which one
  follows; the model chooses the likeliest. Guessing gives 0.25.
- cloze: the last word of a paragraph, given the paragraph before it; every token of the word must be the model's
  likeliest.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

CONTEXT = 128
CONTINUATION = 16
CHOICES = 4
_CLOZE_WORDS = range(40, 120)
_LAST_WORD = re.compile(r"^(.+) ([A-Za-z]{3,})[.!?]$", re.DOTALL)

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Question:
    """Token ids of a context and of its choices, and which of them follows."""

    context: list[int]
    choices: list[list[int]]
    right: int


@dataclass(frozen=True)
class Accuracy:
    """The share of items answered rightly, and its standard error."""

    items: int
    accuracy: float
    error: float


def continuation_questions(documents: Sequence[Sequence[int]], count: int, seed: int = 0) -> list[Question]:
    """Questions from documents of token ids; a document is asked about again where there are fewer than questions."""
    chance = random.Random(seed)
    long_ones = [document for document in documents if len(document) >= CONTEXT + 4 * CHOICES * CONTINUATION]
    if not long_ones:
        raise ValueError("no document is long enough for a question")
    questions = []
    for number in range(count):
        document = long_ones[number % len(long_ones)]
        last = len(document) - CONTINUATION
        follows = chance.randrange(CONTEXT, last + 1)
        others = [start for start in range(0, last + 1, CONTINUATION) if abs(start - follows) >= CONTINUATION]
        starts = [follows, *chance.sample(others, CHOICES - 1)]
        chance.shuffle(starts)
        choices = [list(document[start : start + CONTINUATION]) for start in starts]
        questions.append(Question(list(document[follows - CONTEXT : follows]), choices, starts.index(follows)))
    return questions


def cloze_items(texts: Sequence[str], encode: Encode, count: int) -> list[tuple[list[int], list[int]]]:
    """Token ids of paragraphs without their last word, and of the word, spread over the texts."""
    found = []
    for text in texts:
        for paragraph in text.split("\n\n"):
            match = _LAST_WORD.match(paragraph)
            if match and len(paragraph.split()) in _CLOZE_WORDS:
                found.append((match[1], f" {match[2]}"))
    step = max(1, len(found) // count)
    return [(encode(before), encode(word)) for before, word in found[::step][:count]]


def accuracy(right: Sequence[bool]) -> Accuracy:
    share = sum(right) / len(right)
    return Accuracy(len(right), round(share, 4), round((share * (1 - share) / len(right)) ** 0.5, 4))


def choose(model: Any, question: Question) -> int:
    """The number of the likeliest choice. The context is read once."""
    with torch.inference_mode():
        read = model(input_ids=torch.tensor([question.context]), use_cache=True, logits_to_keep=1)
        read.past_key_values.batch_repeat_interleave(len(question.choices))
        choices = torch.tensor(question.choices)
        scored = model(input_ids=choices[:, :-1], past_key_values=read.past_key_values, use_cache=True)
        first = read.logits[:, -1:].float().expand(len(choices), -1, -1)
        log_p = torch.cat([first, scored.logits.float()], 1).log_softmax(-1)
        return int(log_p.gather(2, choices[..., None]).sum((1, 2)).argmax())


def completes(model: Any, context: list[int], word: list[int]) -> bool:
    """Whether every token of the word is the model's likeliest."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([context + word]), use_cache=False, logits_to_keep=len(word) + 1).logits
        return bool(logits[0, :-1].argmax(-1).tolist() == word)


def tasks(model: Any, texts: Sequence[str], encode: Encode, items: int) -> dict[str, Accuracy]:
    """Accuracies of both tasks on the same items for every model."""
    questions = continuation_questions([encode(text) for text in texts], items)
    chosen = [choose(model, question) == question.right for question in questions]
    words = [completes(model, *item) for item in cloze_items(texts, encode, items)]
    return {"continuation": accuracy(chosen), "cloze": accuracy(words)}
