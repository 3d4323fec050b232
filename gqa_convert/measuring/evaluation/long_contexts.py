"""What a model makes of long contexts, beside its loss: answers, key tokens, and the text that it writes itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gqa_convert.data.model_tokenizer import check_vocabulary
from gqa_convert.data.order import mix
from gqa_convert.errors import OptionError
from gqa_convert.families.generating import generating_with
from gqa_convert.measuring import StageProgress, no_progress
from gqa_convert.measuring.evaluation.candidates import CAUSAL, Candidate, common_length
from gqa_convert.measuring.evaluation.comparison import Mean, mean, with_errors
from gqa_convert.measuring.evaluation.examples import Array, Example, Integers, Material
from gqa_convert.measuring.evaluation.forward import Scored, score
from gqa_convert.measuring.evaluation.retrieval import LENGTHS, QUESTIONS, Answer, ask, share_found
from gqa_convert.measuring.evaluation.retrieval_texts import KINDS, filler, text_beginnings
from gqa_convert.measuring.results import AskedQuestions, Found, Retrieval

SHORT_CONTEXT = 256
"""Tokens of the short context, without which key tokens are unlikely."""
_GAIN, _LIKELY = 2.0, 2.0
"""Of key tokens: how many nats the long context gains at least, and their loss at most (Fang et al. 2024)."""
_TEXTS, _BEGINNING, _WRITTEN = 16, 64, 128
"""The texts that a model writes, and the tokens of each that are given and written."""


@dataclass(frozen=True)
class RetrievalOptions:
    """What models are asked: lengths in tokens, None for those of `LENGTHS` within the context; the questions of each kind
    at each length; the seed of the texts.
    """

    lengths: Sequence[int] | None = None
    questions: int = QUESTIONS
    seed: int = 0


@dataclass(frozen=True)
class LongContexts:
    """A model's answers, and the first model's loss on the text that it writes."""

    answers: list[Answer]
    written_loss: Mean


def asked_questions(models: Sequence[Candidate], objective: str, options: RetrievalOptions) -> AskedQuestions:
    """The questions with the lengths of their prompts, the same for all models.

    Raises:
        OptionError: a model is not causal, or has fewer positions.
    """
    if objective != CAUSAL:
        raise OptionError(f"--retrieval asks causal models, and {models[0].name} is an encoder-decoder: leave it out")
    stated = max(options.lengths or (), default=None)
    longest = common_length(models, f"--lengths names {stated}", stated, LENGTHS[-1])
    lengths = options.lengths or [length for length in LENGTHS if length <= longest] or [longest]
    return AskedQuestions(lengths=sorted(set(lengths)), questions=options.questions, seed=options.seed)


def key_tokens(scored: Scored, loss: Array, batch: int, progress: StageProgress = no_progress) -> Array:
    """Whether each token is one that a model predicts with the whole window and not with a short context: LongPPL's key
    tokens (Fang et al. 2024, arXiv 2410.23771), [n].

    Args:
        scored: the model and its material.
        loss: of the tokens with the whole window, [n].
        batch: windows at a time.
        progress: as of `score`.
    """
    short = scored.material.with_short_context(SHORT_CONTEXT)
    gain = score(Scored(scored.model, short), batch, progress=progress).loss - loss
    return np.asarray((gain > _GAIN) & (loss < _LIKELY))


def ask_about_long_contexts(
    candidate: Candidate,
    model: Any,
    asked: AskedQuestions,
    reader: Any,
    batch: int,
    progress: StageProgress,
) -> LongContexts:
    """Ask a model, and let the first one read what it writes.

    Args:
        candidate: the model.
        model: the same, loaded.
        asked: the questions.
        reader: the first model, loaded.
        batch: texts at a time.
        progress: called with the texts of questions that are done, and their number.

    Raises:
        DataError: the tokenizer does not belong to the model.
    """
    tokenizer = candidate.tokenizer
    check_vocabulary(candidate.config, max(tokenizer(" ".join(filler()), verbose=False)["input_ids"]), candidate.folder)
    answers = ask(model, tokenizer, asked.lengths, asked.questions, asked.seed, batch=batch, progress=progress)
    return LongContexts(answers, loss_of_rows(reader, write(model, tokenizer, asked.seed), batch))


def write(model: Any, tokenizer: Any, seed: int) -> Integers:
    """Texts that a model continues from its own distribution, [_TEXTS, _BEGINNING + _WRITTEN]."""
    beginnings = torch.tensor(text_beginnings(tokenizer, _TEXTS, _BEGINNING, seed), device=model.device)
    torch.manual_seed(mix(seed))
    sampling = generating_with(model, do_sample=True, top_k=0, max_new_tokens=_WRITTEN, pad_token_id=0)
    with sampling, torch.inference_mode():
        rows = model.generate(beginnings, attention_mask=torch.ones_like(beginnings))
    return np.asarray(rows.cpu().numpy(), np.int64)


def loss_of_rows(model: Any, rows: Integers, batch: int) -> Mean:
    """The loss of a model on the tokens of texts behind their beginnings, with a standard error over texts."""
    examples = []
    for number, row in enumerate(rows):
        examples.append(Example(row[:-1], row[_BEGINNING:], np.full(_WRITTEN, number)))
    material = Material(examples, len(rows))
    loss = score(Scored(model, material), batch).loss
    return mean(material.by_block(loss), material.by_block(np.ones_like(loss)))


def retrieval(asked: LongContexts, first: LongContexts | None) -> Retrieval:
    """The shares found of all, of each kind and at each length, and the differences from another model."""
    kinds, lengths = (None, *KINDS), (None, *dict.fromkeys(answer.length for answer in asked.answers))
    written = {"written_loss": asked.written_loss}
    if first is not None:
        written["written_difference"] = asked.written_loss.minus(first.written_loss)
    found = [_found(asked, first, kind, length) for kind in kinds for length in lengths]
    return Retrieval(found=found, **with_errors(written))


def _found(asked: LongContexts, first: LongContexts | None, kind: str | None, length: int | None) -> Found:
    def chosen(each: LongContexts) -> list[Answer]:
        return [answer for answer in each.answers if kind in (None, answer.kind) and length in (None, answer.length)]

    answers = chosen(asked)
    shares = {"found": share_found(answers)}
    if first is not None:
        shares["difference"] = shares["found"].minus(share_found(chosen(first)))
    return Found(kind=kind, length=length, questions=len(answers), **with_errors(shares))
