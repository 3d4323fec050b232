"""Evaluates several models on the same text: everything except the forward passes."""

import gc
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from gqa_convert.data.model_tokenizer import check_vocabulary
from gqa_convert.data.sources import Source, find_commits, pinned, with_pairs
from gqa_convert.data.speech import AudioFile, SpeechModel
from gqa_convert.errors import OptionError
from gqa_convert.families.context_length import LONGEST, SPAN_LENGTH
from gqa_convert.families.loading import hears, is_encoder_decoder
from gqa_convert.measuring import Progress, memory_explained, no_progress
from gqa_convert.measuring.results import AskedQuestions, EvaluationFile, Found, ModelScores
from gqa_convert.runtime.json_objects import JsonObject
from gqa_convert.runtime.machine import chosen_device, measurement

from . import scoring
from .candidates import SPANS, Candidate, common_length, common_objective, find_models, load
from .examples import Material, Spelling, read_text, speech_material, spelling
from .retrieval import ask, shares, with_lengths
from .retrieval_texts import Question, filler

_LESS = "lower --batch or --window, use --dtype bfloat16, or a device with more memory"
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class EvaluationOptions:
    """How models are evaluated.

    Attributes:
        reference: a model whose predicted distributions the others are compared with; it stays in
            memory beside each of them. By default losses alone are compared, with the first
            model's.
        revision: of models that are Hub ids.
        window: tokens of a window or of an encoder's input; None for the models' positions up to
            2048, and 512 for span corruption.
        tokens: maximum number of tokens of text; None for whole files, and for 1M tokens of a Hub
            dataset.
        batch: windows or examples at a time.
        dtype: see `candidates.load`.
        device: the first GPU by default; the CPU where there is none.
        retrieval: questions about long texts, of causal models; with them the first model, without
            a reference, is one. None for no questions.
    """

    reference: str | None = None
    revision: str | None = None
    window: int | None = None
    tokens: int | None = None
    batch: int = 4
    dtype: str = "auto"
    device: str | None = None
    retrieval: AskedQuestions | None = None


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
    if options.dtype not in DTYPES:
        raise OptionError(f"--dtype is {options.dtype!r}: give one of {', '.join(DTYPES)}")
    if data is not None:
        if (data.source_field is None) != (data.target_field is None):
            raise OptionError(
                "--source-field and --target-field need each other: give both or neither"
            )
        (data,) = pinned([data], find_commits([data], {}))
    names = list(models)
    if options.reference is not None:
        names.insert(0, options.reference)
    device = chosen_device(options.device)

    # what all models can be scored on
    found = find_models(names, options.revision)
    first = found[0].config
    if data is not None and is_encoder_decoder(first) and not hears(first):
        data = with_pairs(data)
    objective = common_objective(found, data)
    most = SPAN_LENGTH if objective == SPANS else LONGEST
    window = common_length(found, f"--window is {options.window}", options.window, most)
    asked = options.retrieval and with_lengths(options.retrieval, found, objective)

    # the text
    text = None
    described: JsonObject = {}
    if data is not None:
        reading = partial(progress, "reading")
        text = read_text(data, found[0], objective, window, options.tokens, reading)
        described = {"data": asdict(data) | {"tokens_limit": options.tokens}, "context": window}

    # the models, one after the other
    evaluation = _Evaluation(text, asked, options, device, progress)
    scores = []
    for candidate in found:
        gc.collect()  # the model before it
        with memory_explained(candidate.name, _LESS):
            scores.append(evaluation.scores_of(candidate))
    return EvaluationFile(
        **measurement("evaluate", command, device),
        **described,
        questions=asked,
        objective=objective,
        reference=scores.pop(0) if options.reference else None,
        results=scores,
    )


@dataclass
class _Evaluation:
    """Measures models, one after the other, on a text and by questions, and compares them with the
    first one.

    Attributes:
        text: in tokens; sounds, which every model encodes; or None.
        asked: questions, or None.
        options: how text is scored.
        device: where models run.
        progress: called with the name of a stage, the steps done and the number of steps.
        first: the losses of the first model, and its name.
        answers: those of the first model.
        reference: the first model, if divergences from it are measured.
        spelling: for the language that the first model hears.
    """

    text: Material | list[AudioFile] | None
    asked: AskedQuestions | None
    options: EvaluationOptions
    device: str
    progress: Progress
    first: tuple[scoring.Means, str] | None = None
    answers: list[Question] | None = None
    reference: scoring.Scored | None = None
    spelling: Spelling | None = None

    def scores_of(self, candidate: Candidate) -> ModelScores:
        """A model's entry in the results.

        Raises:
            DataError: the tokenizer does not belong to the model.
        """
        model = load(candidate, self.options.dtype, self.device)
        means: dict[str, scoring.Mean] = {}
        found: JsonObject = {}
        material = self.text
        if isinstance(material, list):
            show = partial(self.progress, f"transcribing with {candidate.name}")
            speech = SpeechModel(model, candidate.folder)
            material, spoken = speech_material(
                speech, material, self.options.batch, self.options.tokens, show
            )
            self.spelling = self.spelling or spelling(speech, material)
            means["word_error_rate"] = scoring.mean(*scoring.word_errors(spoken, self.spelling))
        if material is not None:
            check_vocabulary(candidate.config, material.largest, candidate.folder)
            show = partial(self.progress, f"scoring {candidate.name}")
            scored = scoring.Scored(model, material)
            loss, *kl = scoring.score(scored, self.options.batch, self.reference, show)
            means |= scoring.measured(material, loss, *kl)
            found = scoring.with_errors(means) | {
                "tokens": len(loss),
                "bytes": int(material.sizes.sum()) or None,
                "scored_nan": int((~np.isfinite(loss)).sum()),
                "note": material.note,
            }
            if self.first is not None:
                found["difference"] = scoring.difference(means, *self.first)
            self.first = self.first or (means, candidate.name)
            if self.options.reference:
                self.reference = self.reference or scored
        if self.asked is not None:
            found["retrieval"] = self._retrieval(candidate, model, self.asked)
        dtype = str(model.dtype).removeprefix("torch.")
        return ModelScores(**candidate.stated, dtype=dtype, **found)

    def _retrieval(self, candidate: Candidate, model: Any, asked: AskedQuestions) -> list[Found]:
        tokenizer = candidate.tokenizer
        ids = tokenizer(" ".join(filler()), verbose=False)["input_ids"]
        check_vocabulary(candidate.config, max(ids), candidate.folder)
        show = partial(self.progress, f"asking {candidate.name}")
        batch = self.options.batch
        answers = ask(model, tokenizer, **asked.as_json(), batch=batch, progress=show)
        found = shares(answers, self.answers)
        self.answers = self.answers or answers
        return found
