"""Evaluates several models on the same text: everything except the forward passes."""

import gc
import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from gqa_convert.checkpoint.devices import chosen_device
from gqa_convert.checkpoint.machine import measurement
from gqa_convert.checkpoint.paths import local_path
from gqa_convert.data.audio_files import list_audio_files
from gqa_convert.data.decoder_start import decoder_start, starts_with_last
from gqa_convert.data.model_tokenizer import check_vocabulary
from gqa_convert.data.sources import Source, find_commits, pinned
from gqa_convert.data.speech import SpeechModel
from gqa_convert.errors import OptionError
from gqa_convert.families.loading import no_bars
from gqa_convert.measuring import Progress, no_progress
from gqa_convert.measuring.evaluation import candidates
from gqa_convert.measuring.evaluation.candidates import CAUSAL, SPANS, SPEECH, Candidate
from gqa_convert.measuring.evaluation.comparison import Measured, incomparable, model_scores
from gqa_convert.measuring.evaluation.examples import (
    Material,
    pair_material,
    span_material,
    speech_material,
    text_material,
)
from gqa_convert.measuring.evaluation.forward import Scored, score
from gqa_convert.measuring.evaluation.long_contexts import (
    LongContexts,
    RetrievalOptions,
    ask_about_long_contexts,
    asked_questions,
    key_tokens,
    retrieval,
)
from gqa_convert.measuring.evaluation.texts import read_pairs, read_pieces
from gqa_convert.measuring.out_of_memory import memory_explained
from gqa_convert.measuring.results import AskedQuestions, EvaluationFile, ModelScores, ScoredText

_LESS = "lower --batch or --window, use --dtype bfloat16, or a device with more memory"
_SEED = 0
"""Of span corruption."""
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class EvaluationOptions:
    """How models are evaluated.

    Attributes:
        reference: a model whose predicted distributions the others are compared with; it stays in memory beside each of
            them. By default losses alone are compared, with the first model's.
        revision: of models that are Hub ids.
        window: tokens of a window or of an encoder's input; None for the models' positions up to 2048, and 512 for
            span corruption.
        tokens: maximum number of tokens of text, or of pairs; None for whole files, and for 1M tokens of a Hub
            dataset.
        batch: windows or examples at a time.
        dtype: see `candidates.load`.
        device: the first GPU by default; the CPU where there is none.
        retrieval: questions about long texts, of causal models; with them the first model, without a reference, is one.
            None for no questions.
    """

    reference: str | None = None
    revision: str | None = None
    window: int | None = None
    tokens: int | None = None
    batch: int = 4
    dtype: str = "auto"
    device: str | None = None
    retrieval: RetrievalOptions | None = None


def evaluate(
    models: Sequence[str],
    data: Source | None,
    options: EvaluationOptions,
    *,
    command: list[str] | None = None,
    progress: Progress = no_progress,
) -> EvaluationFile:
    """Evaluate models on the same text.

    Args:
        models: folders and Hub ids.
        data: the text; None for questions alone.
        options: how to score it.
        command: the command line, for the record.
        progress: called with the name of a stage, the steps done and the number of steps.

    Raises:
        GQAConvertError: one of its subclasses for models, text or options that can't be evaluated.
    """
    _check(data, options)
    if data is not None:
        (data,) = pinned([data], find_commits([data], {}))
    names = list(models)
    if options.reference is not None:
        names.insert(0, options.reference)
    device = chosen_device(options.device)
    with warnings.catch_warnings(), no_bars():
        warnings.simplefilter("ignore")  # torch's and transformers', for those who program with them
        found = candidates.find_models(names, options.revision)
        objective = candidates.common_objective(found, pairs=data is not None and data.kind == "pairs")
        window = candidates.common_window(found, objective, options.window)
        asked = None
        if options.retrieval:
            asked = asked_questions(found, objective, options.retrieval)
        text = None if data is None else _read(data, objective, found[0].tokenizer, options.tokens, progress)
        evaluation = _Evaluation(options, asked, text, objective, window, device, progress)
        scores = []
        for candidate in found:
            gc.collect()  # the model before it
            with memory_explained(candidate.name, _LESS):
                scores.append(evaluation.scores_of(candidate))
    return EvaluationFile(
        **measurement("evaluate", command, device),
        data=None if data is None else _described(data, options, text),
        questions=asked,
        objective=objective,
        context=None if data is None else window,
        reference=scores.pop(0) if options.reference else None,
        results=scores,
    )


@dataclass
class _Subject:
    """A model, loaded, and what was measured of it, None where it was not."""

    candidate: Candidate
    model: Any
    measured: Measured | None = None
    asked: LongContexts | None = None


@dataclass
class _Evaluation:
    """Measures models, one after the other, on a text and by questions.

    Attributes:
        options: how text is scored.
        questions: to ask, None for none.
        text: to score, None for none.
        objective: on which models are scored.
        window: tokens of a window or example.
        device: where models run.
        progress: called with the name of a stage, the steps done and the number of steps.
        first: the model that those after it are compared with.
    """

    options: EvaluationOptions
    questions: AskedQuestions | None
    text: Any
    objective: str
    window: int
    device: str
    progress: Progress
    first: _Subject | None = None

    def scores_of(self, candidate: Candidate) -> ModelScores:
        """A model's entry in the results.

        Raises:
            DataError: the tokenizer does not belong to the model.
        """
        model = candidates.load(candidate, self.options.dtype, self.device)
        subject = _Subject(candidate, model)
        first = self.first or _Subject(candidate, model)
        found: dict[str, Any] = {}
        if self.text is not None:
            subject.measured = self._score(candidate, model, first)
            found = model_scores(subject.measured, first.measured)
        if self.questions:
            show = partial(self.progress, f"asking {candidate.name}")
            reader = first.candidate, first.model
            subject.asked = ask_about_long_contexts(candidate, model, self.questions, reader, self.options.batch, show)
            found["retrieval"] = retrieval(subject.asked, first.asked)
        if self.first is None:
            self.first = subject
            if not (self.options.reference or self.questions):
                subject.model = None  # whose distributions are not compared
        return ModelScores(
            model=candidate.name,
            revision=candidate.revision,
            fingerprint=candidate.fingerprint,
            kv_bytes_per_token=candidate.kv_bytes_per_token,
            dtype=str(model.dtype).removeprefix("torch."),
            **found,
        )

    def _score(self, candidate: Candidate, model: Any, first: _Subject) -> Measured:
        """The losses on the text, and divergences from the first model if that is loaded."""
        material, others = self._material(candidate, model), first.measured
        check_vocabulary(candidate.config, material.largest, candidate.folder)
        problem = reference = is_key = None
        if others is not None:
            problem = incomparable(candidate, material, others)
            if not problem:
                is_key = others.is_key
                reference = None if first.model is None else Scored(first.model, others.material)
        show = partial(self.progress, f"scoring {candidate.name}")
        scored, batch = Scored(model, material), self.options.batch
        scores = score(scored, batch, reference, show)
        if self.questions and others is None:
            is_key = key_tokens(scored, scores.loss, batch, show)
        return Measured(candidate, material, scores, problem, is_key)

    def _material(self, candidate: Candidate, model: Any) -> Material:
        """The model's tokens of the text or sound, in examples."""
        tokenizer = candidate.tokenizer
        if self.objective == SPEECH:
            show = partial(self.progress, f"transcribing with {candidate.name}")
            speech, options = SpeechModel(model, candidate.folder), self.options
            return speech_material(speech, self.text, batch=options.batch, tokens=options.tokens, progress=show)
        show = partial(self.progress, f"tokenising for {candidate.name}")
        if self.objective == CAUSAL:
            return text_material(self.text, tokenizer, window=self.window, progress=show)
        start = decoder_start(candidate.folder, candidate.config, tokenizer)
        if self.objective == SPANS:
            return span_material(self.text, tokenizer, start=start, length=self.window, seed=_SEED)
        begin = None if starts_with_last(candidate.config) else start
        return pair_material(self.text, tokenizer, start=begin, length=self.window, progress=show)


def _check(data: Source | None, options: EvaluationOptions) -> None:
    if data is not None and (data.source_field is None) != (data.target_field is None):
        raise OptionError("--source-field and --target-field need each other: give both or neither")
    if options.dtype not in DTYPES:
        raise OptionError(f"--dtype is {options.dtype!r}: give one of {', '.join(DTYPES)}")


def _read(data: Source, objective: str, tokenizer: Any, tokens: int | None, progress: Progress) -> Any:
    show = partial(progress, "reading")
    if objective == SPEECH:
        return list_audio_files(local_path(data.source))
    if data.source_field and data.target_field:
        return read_pairs(data, (data.source_field, data.target_field), tokens, show)
    return read_pieces(data, tokenizer, tokens, show)


def _described(data: Source, options: EvaluationOptions, text: Any) -> ScoredText:
    digest = hashlib.sha256()
    for part in text:
        digest.update(repr(tuple(part[:2])).encode())
    return ScoredText.model_validate(asdict(data) | {"tokens_limit": options.tokens, "sha256": digest.hexdigest()})
