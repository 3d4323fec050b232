"""What a causal model finds in long texts: it continues prompts greedily, and exact answers count.

    from .retrieval import ask, share_found

    answers = ask(model, tokenizer, lengths=[512, 2048], questions=24)
    share_found(answers).value

The questions about one text are answered with one K/V cache of what they share where the model's
cache can be copied. Those of one text are alike, so standard errors are computed over texts.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gqa_convert.errors import OptionError
from gqa_convert.families.generating import generating_with
from gqa_convert.families.loading import cache_name
from gqa_convert.measuring import StageProgress, no_progress
from gqa_convert.measuring.results import AskedQuestions, Found
from gqa_convert.runtime.json_objects import JsonObject

from .candidates import CAUSAL, Candidate, common_length
from .retrieval_texts import KINDS, PER_TEXT, Question, RetrievalText, make_text
from .scoring import Mean, mean

QUESTIONS = 24
"""Of each kind at each length, by default."""
LENGTHS = (512, 1024, 2048, 4096)
"""Tokens of a prompt and the room for its answer, by default, where the context is as long."""


def with_lengths(
    asked: AskedQuestions, models: Sequence[Candidate], objective: str
) -> AskedQuestions:
    """The questions with the lengths of their prompts, the same for all models.

    Args:
        asked: without lengths, those of `LENGTHS` that all models have positions for.
        models: all of them.
        objective: of the models.

    Raises:
        OptionError: a model is not causal, or has fewer positions.
    """
    if objective != CAUSAL:
        raise OptionError(
            f"--retrieval asks causal models, and {models[0].name} is an encoder-decoder: leave it "
            "out"
        )
    stated = max(asked.lengths, default=None)
    longest = common_length(models, f"--lengths names {stated}", stated, LENGTHS[-1])
    lengths = asked.lengths or [length for length in LENGTHS if length <= longest] or [longest]
    return asked.model_copy(update={"lengths": sorted(set(lengths))})


def ask(
    model: Any,
    tokenizer: Any,
    lengths: Sequence[int] = LENGTHS,
    questions: int = QUESTIONS,
    *,
    batch: int = 8,
    progress: StageProgress = no_progress,
) -> list[Question]:
    """Ask a model questions about long texts. Models are asked the same questions in the same
    order.

    Args:
        model: a transformers model with `generate`, in evaluation mode, on any device.
        tokenizer: the model's.
        lengths: tokens of a prompt with the room for its answer.
        questions: of each kind at each length, rounded up to whole texts.
        batch: questions at a time.
        progress: called with the texts that are done, and their number.

    Raises:
        OptionError: a length is too short for the questions.
    """
    end = model.generation_config.eos_token_id or tokenizer.eos_token_id
    padding = end[0] if isinstance(end, list) else end or 0
    greedy = generating_with(model, eos_token_id=end, pad_token_id=padding, do_sample=False)
    texts = list(product(lengths, range(-(-questions // PER_TEXT))))
    answers = []
    with greedy, torch.inference_mode():
        for done, (length, number) in enumerate(texts, 1):
            text = make_text(tokenizer, length, number)
            ids = continuations(model, text, batch)
            written = tokenizer.batch_decode(ids, skip_special_tokens=True)
            for question, each in zip(text.questions, written, strict=True):
                answers.append(replace(question, written=each))
            progress(done, len(texts))
    return answers


def continuations(model: Any, text: RetrievalText, batch: int) -> list[Tensor]:
    """The tokens that a model writes behind each prompt of a text, of which it reads the shared
    beginning once.

    Args:
        model: without settings for generation.
        text: the prompts.
        batch: prompts at a time.
    """
    prompts = torch.tensor([question.prompt for question in text.questions], device=model.device)
    name = cache_name(model)
    shared = getattr(_continue(model, prompts[:1, : text.shared], 1), name)
    written: list[Tensor] = []
    for rows in prompts.split(batch):
        found = _continue(model, rows, text.room, **{name: _repeated(shared, len(rows))})
        written += found.sequences[:, rows.shape[1] :].cpu()
    return written


def _continue(model: Any, rows: Tensor, tokens: int, **given: Any) -> Any:
    return model.generate(
        rows,
        attention_mask=torch.ones_like(rows),
        max_new_tokens=tokens,
        return_dict_in_generate=True,
        **given,
    )


def _repeated(shared: Any, count: int) -> Any:
    """A copy of a cache for more rows; None where it holds other things than keys and values."""
    layers = getattr(shared, "layers", None)
    if not layers or any(getattr(layer, "keys", None) is None for layer in layers):
        return None
    repeated = copy.deepcopy(shared)
    repeated.batch_repeat_interleave(count)
    return repeated


def share_found(answers: Sequence[Question]) -> Mean:
    """The share of right answers, with a standard error over texts."""
    texts: dict[tuple[int, int], list[bool]] = {}
    for answer in answers:
        texts.setdefault((answer.length, answer.text), []).append(answer.is_right)
    right_and_asked = np.array([(sum(each), len(each)) for each in texts.values()], np.float64)
    return mean(*right_and_asked.T)


def shares(answers: Sequence[Question], first: Sequence[Question] | None) -> list[Found]:
    """The shares found of all, of each kind and at each length, and the differences from another
    model's answers.
    """
    lengths = (None, *dict.fromkeys(answer.length for answer in answers))
    found = []
    for kind, length in product((None, *KINDS), lengths):
        ours = _chosen(answers, kind, length)
        share = share_found(ours)
        figures = _with_error("found", share)
        if first is not None:
            theirs = share_found(_chosen(first, kind, length))
            figures |= _with_error("difference", share.minus(theirs))
        found.append(Found(kind=kind, length=length, questions=len(ours), **figures))
    return found


def _chosen(answers: Sequence[Question], kind: str | None, length: int | None) -> list[Question]:
    return [each for each in answers if kind in (None, each.kind) and length in (None, each.length)]


def _with_error(name: str, share: Mean) -> JsonObject:
    """A share and its standard error. Where all texts agree, they tell no spread: the error is then
    that end of Wilson's score interval, at one standard error and with texts as trials, which is
    not the share itself.
    """
    texts = len(share.deviations)
    return {name: share.value, f"{name}_standard_error": share.error or 1 / (texts + 1)}
