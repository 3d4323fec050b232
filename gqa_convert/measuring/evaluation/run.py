"""Evaluates several models on the same text: everything except the forward passes."""

import gc
import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

from gqa_convert.checkpoint.devices import chosen_device
from gqa_convert.checkpoint.machine import measurement
from gqa_convert.checkpoint.paths import local_path
from gqa_convert.data.audio_files import list_audio_files
from gqa_convert.data.decoder_start import decoder_start, starts_with_last
from gqa_convert.data.model_tokenizer import check_vocabulary
from gqa_convert.data.sources import Source, find_commits, pinned
from gqa_convert.data.speech import SpeechModel
from gqa_convert.data.token_files import default_cache
from gqa_convert.errors import OptionError
from gqa_convert.families.loading import no_bars
from gqa_convert.measuring import Progress
from gqa_convert.measuring.evaluation import candidates
from gqa_convert.measuring.evaluation.candidates import CAUSAL, SPANS, SPEECH, Candidate
from gqa_convert.measuring.evaluation.comparison import (
    UNDEFINED,
    Measured,
    identity,
    incomparable,
    mean,
    model_scores,
)
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
    chosen_lengths,
    key_tokens,
    measure,
    retrieval,
)
from gqa_convert.measuring.evaluation.texts import read_pairs, read_pieces
from gqa_convert.measuring.evaluation.word_errors import word_errors
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
    progress: Progress = lambda stage, done, total: None,
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
        (data,) = pinned([data], find_commits([data], {}, default_cache()))
    names = list(models)
    if options.reference is not None:
        names.insert(0, options.reference)
    device = chosen_device(options.device)
    with warnings.catch_warnings(), no_bars():
        warnings.simplefilter("ignore")  # torch's and transformers', for those who program with them
        found = candidates.find_models(names, options.revision)
        objective = candidates.common_objective(found, pairs=data is not None and data.kind == "pairs")
        window = candidates.common_window(found, objective, options.window)
        lengths = chosen_lengths(found, objective, options.retrieval) if options.retrieval else []
        text = None if data is None else _read(data, objective, found[0].tokenizer, options.tokens, progress)
        task = _Task(text, objective, window, lengths)
        first: _Subject | None = None
        scores = []
        for candidate in found:
            gc.collect()  # the model before it
            with memory_explained(candidate.name, _LESS):
                model = candidates.load(candidate, options.dtype, device)
                entry, subject = _measured(candidate, model, task, options, first, progress)
            scores.append(entry)
            if first is None:
                first = subject if options.reference or options.retrieval else subject._replace(scored=None)
            del model, subject
    questions = None
    if options.retrieval:
        questions = AskedQuestions(lengths=lengths, questions=options.retrieval.questions, seed=options.retrieval.seed)
    return EvaluationFile(
        **measurement("evaluate", command, device).as_json(),
        data=None if data is None else _described(data, options, text),
        questions=questions,
        objective=objective,
        context=None if data is None else window,
        reference=scores.pop(0) if options.reference else None,
        results=scores,
    )


class _Task(NamedTuple):
    """What models are measured on: a text, how it is scored, and the lengths of the texts that questions are about."""

    text: Any
    objective: str
    window: int
    lengths: Sequence[int]


class _Subject(NamedTuple):
    """What was measured of a model, each None where it was not; those after the first are compared with it."""

    measured: Measured | None
    scored: Scored | None
    asked: LongContexts | None


def _measured(
    candidate: Candidate,
    model: Any,
    task: _Task,
    options: EvaluationOptions,
    first: _Subject | None,
    progress: Progress,
) -> tuple[ModelScores, _Subject]:
    """The entry of a model in the results, and what later ones are compared with."""
    entry = ModelScores(**identity(candidate, str(model.dtype).removeprefix("torch.")))
    measured = scored = asked = None
    if task.text is not None:
        scored = Scored(model, _material(candidate, model, task, options, progress))
        others = first and first.measured
        measured = _score(candidate, scored, others, first and first.scored, options, progress)
        entry = model_scores(measured, others)
    if options.retrieval:
        show = partial(progress, f"asking {candidate.name}")
        others_asked = first and first.asked
        asked = measure(candidate, model, others_asked, task.lengths, options.retrieval, options.batch, show)
        entry = entry.model_copy(update={"retrieval": retrieval(asked, others_asked)})
    return entry, _Subject(measured, scored, asked)


def _check(data: Source | None, options: EvaluationOptions) -> None:
    if data is not None and (data.source_field is None) != (data.target_field is None):
        raise OptionError("--source-field and --target-field need each other: give both or neither")
    for name in ("tokens", "batch", "window"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise OptionError(f"--{name} is {value}, expected a number above 0")
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
    read = asdict(data) | {"tokens_limit": options.tokens, "sha256": digest.hexdigest()}
    return ScoredText.model_validate(read)


def _material(
    candidate: Candidate,
    model: Any,
    task: _Task,
    options: EvaluationOptions,
    progress: Progress,
) -> Material:
    """The model's tokens of the text or sound, in examples."""
    tokenizer = candidate.tokenizer
    if task.objective == SPEECH:
        show = partial(progress, f"transcribing with {candidate.name}")
        speech = SpeechModel(model, candidate.folder)
        return speech_material(speech, task.text, batch=options.batch, tokens=options.tokens, progress=show)
    show = partial(progress, f"tokenising for {candidate.name}")
    if task.objective == CAUSAL:
        return text_material(task.text, tokenizer, window=task.window, progress=show)
    start = decoder_start(candidate.folder, candidate.config, tokenizer)
    if task.objective == SPANS:
        return span_material(task.text, tokenizer, start=start, length=task.window, seed=_SEED)
    first = None if starts_with_last(candidate.config) else start
    return pair_material(task.text, tokenizer, start=first, length=task.window, progress=show)


def _score(
    candidate: Candidate,
    scored: Scored,
    first: Measured | None,
    reference: Scored | None,
    options: EvaluationOptions,
    progress: Progress,
) -> Measured:
    """A model's scores.

    Args:
        candidate: the model.
        scored: the same, loaded, with its examples.
        first: scores of the model that it is compared with.
        reference: that model, loaded, if its distributions are compared.
        options: examples at a time, and whether key tokens are found.
        progress: called with the name of a stage, the steps done and the number of steps.

    Raises:
        DataError: the tokenizer does not belong to the model.
    """
    material = scored.material
    check_vocabulary(candidate.config, material.largest, candidate.folder)
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(f"scoring {candidate.name}", done, material.tokens)

    problem = None if first is None else incomparable(candidate, material, first)
    scores = score(scored, options.batch, reference=None if problem else reference, progress=advance)
    is_key = None
    if options.retrieval and first is None:
        done = 0
        is_key = key_tokens(scored, scores.loss, options.batch, advance)
    elif first is not None and not problem:
        is_key = first.is_key
    dtype = str(scored.model.dtype).removeprefix("torch.")
    words = UNDEFINED if material.heard is None else mean(*word_errors(material.said, material.heard))
    return Measured(candidate, dtype, material, scores, problem, words, is_key)
