"""What a model makes of long contexts, beside its loss: answers, key tokens, and the text that it writes itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gqa_convert.data.model_tokenizer import check_vocabulary
from gqa_convert.data.order import mix
from gqa_convert.errors import OptionError
from gqa_convert.families.context_length import stated_positions
from gqa_convert.measuring.evaluation.candidates import CAUSAL, Candidate
from gqa_convert.measuring.evaluation.comparison import UNDEFINED, Mean, is_same_vocabulary, mean
from gqa_convert.measuring.evaluation.examples import Example, Material
from gqa_convert.measuring.evaluation.forward import Scored, score
from gqa_convert.measuring.evaluation.retrieval import LENGTHS, QUESTIONS, Answer, ask, share_found
from gqa_convert.measuring.evaluation.retrieval_texts import KINDS, filler, text_beginnings
from gqa_convert.measuring.results import Found, Retrieval

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
    """A model, its answers, and the first model's loss on the text that it writes."""

    candidate: Candidate
    model: Any
    answers: list[Answer]
    written_loss: Mean


def chosen_lengths(models: Sequence[Candidate], objective: str, options: RetrievalOptions) -> list[int]:
    """The lengths of the prompts, the same for all models.

    Raises:
        OptionError: a model is not causal, has fewer positions, or there are no questions.
    """
    if objective != CAUSAL:
        raise OptionError(f"--retrieval asks causal models, and {models[0].name} is an encoder-decoder: leave it out")
    if options.questions < 1:
        raise OptionError(f"--questions is {options.questions}, expected a number above 0")
    longest = LENGTHS[-1] if options.lengths is None else max(options.lengths)
    for model in models:
        positions = stated_positions(model.config) or longest
        if options.lengths is not None and positions < longest:
            raise OptionError(
                f"--lengths names {longest}, and {model.name} has positions for {positions} tokens: lower it"
            )
        longest = min(longest, positions)
    return sorted(set(options.lengths or [length for length in LENGTHS if length <= longest] or [longest]))


def key_tokens(
    scored: Scored, loss: npt.NDArray[np.float32], batch: int, progress: Callable[[int], None] = lambda tokens: None
) -> npt.NDArray[np.bool_]:
    """Whether each token is one that a model predicts with the whole window and not with a short context: LongPPL's key
    tokens (Fang et al. 2024, arXiv 2410.23771), [n].

    Args:
        scored: the model and its material.
        loss: of the tokens with the whole window, [n].
        batch: windows at a time.
        progress: called after each batch with the number of tokens in it.
    """
    short = scored.material.with_short_context(SHORT_CONTEXT)
    gain = score(Scored(scored.model, short), batch, progress=progress).loss - loss
    return np.asarray((gain > _GAIN) & (loss < _LIKELY))


def measure(
    candidate: Candidate,
    model: Any,
    first: LongContexts | None,
    lengths: Sequence[int],
    options: RetrievalOptions,
    batch: int,
    progress: Callable[[int, int], None],
) -> LongContexts:
    """Ask a model, and let the first one read what it writes, if their tokens are the same.

    Raises:
        DataError: the tokenizer does not belong to the model.
    """
    tokenizer = candidate.tokenizer
    check_vocabulary(candidate.config, max(tokenizer(" ".join(filler()), verbose=False)["input_ids"]), candidate.folder)
    answers = ask(model, tokenizer, lengths, options.questions, options.seed, batch=batch, progress=progress)
    loss = UNDEFINED
    if first is None or is_same_vocabulary(tokenizer, first.candidate.tokenizer):
        loss = loss_of_rows(first.model if first else model, write(model, tokenizer, options.seed), batch)
    return LongContexts(candidate, model, answers, loss)


def write(model: Any, tokenizer: Any, seed: int) -> npt.NDArray[np.int64]:
    """Texts that a model continues from its own distribution, [_TEXTS, _BEGINNING + _WRITTEN]."""
    from transformers import GenerationConfig

    beginnings = torch.tensor(text_beginnings(tokenizer, _TEXTS, _BEGINNING, seed), device=model.device)
    sampling = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=_WRITTEN, pad_token_id=0)
    stated, model.generation_config = model.generation_config, sampling
    torch.manual_seed(mix(seed))
    try:
        with torch.inference_mode():
            rows = model.generate(beginnings, attention_mask=torch.ones_like(beginnings))
    finally:
        model.generation_config = stated
    return np.asarray(rows.cpu().numpy(), np.int64)


def loss_of_rows(model: Any, rows: npt.NDArray[np.int64], batch: int) -> Mean:
    """The loss of a model on the tokens of texts behind their beginnings, with a standard error over texts."""
    examples = [Example(row[:-1], row[_BEGINNING:]) for row in rows]
    material = Material(examples, np.repeat(np.arange(len(rows)), _WRITTEN), len(rows))
    loss = score(Scored(model, material), batch).loss
    return mean(material.by_block(loss), material.by_block(np.ones(len(loss))))


def retrieval(measured: LongContexts, first: LongContexts | None) -> Retrieval:
    """The shares found of all, of each kind and at each length, and the differences from another model."""
    kinds, lengths = (None, *KINDS), (None, *dict.fromkeys(answer.length for answer in measured.answers))
    written = measured.written_loss if first is None else measured.written_loss.minus(first.written_loss)
    return Retrieval(
        found=[_found(measured, first, kind, length) for kind in kinds for length in lengths],
        written_loss=measured.written_loss.value,
        written_loss_standard_error=measured.written_loss.error,
        written_difference=None if first is None else written.value,
        written_difference_standard_error=None if first is None else written.error,
    )


def _found(measured: LongContexts, first: LongContexts | None, kind: str | None, length: int | None) -> Found:
    chosen = [
        [answer for answer in each.answers if kind in (None, answer.kind) and length in (None, answer.length)]
        for each in (measured, first or measured)
    ]
    share, other = map(share_found, chosen)
    assert share.value is not None
    difference = UNDEFINED if first is None else share.minus(other)
    return Found(
        kind=kind,
        length=length,
        questions=len(chosen[0]),
        found=share.value,
        standard_error=share.error,
        difference=difference.value,
        difference_standard_error=difference.error,
    )
