"""Evaluates several models on the same text: everything except the forward passes."""

import gc
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from gqa_convert.data.documents import Piece
from gqa_convert.data.model_tokenizer import check_vocabulary, decoder_start, starts_with_last
from gqa_convert.data.sources import Source, find_commits, pinned
from gqa_convert.data.speech import AudioFile, SpeechModel, list_audio_files
from gqa_convert.errors import OptionError
from gqa_convert.families.context_length import LONGEST, SPAN_LENGTH
from gqa_convert.families.loading import no_bars
from gqa_convert.measuring import Progress, memory_explained, no_progress
from gqa_convert.measuring.evaluation.candidates import (
    CAUSAL,
    SPANS,
    SPEECH,
    Candidate,
    common_length,
    common_objective,
    find_models,
    load,
)
from gqa_convert.measuring.evaluation.comparison import Means, difference, measured, with_errors
from gqa_convert.measuring.evaluation.examples import (
    Material,
    Normal,
    pair_material,
    read_documents,
    span_material,
    speech_material,
    text_material,
)
from gqa_convert.measuring.evaluation.forward import Scored, score
from gqa_convert.measuring.evaluation.retrieval import ask, shares, with_lengths
from gqa_convert.measuring.evaluation.retrieval_texts import Question, filler
from gqa_convert.measuring.results import AskedQuestions, EvaluationFile, ModelScores
from gqa_convert.runtime.json_objects import JsonObject
from gqa_convert.runtime.machine import chosen_device, measurement
from gqa_convert.runtime.paths import local_path

_LESS = "lower --batch or --window, use --dtype bfloat16, or a device with more memory"
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
        tokens: maximum number of tokens of text; None for whole files, and for 1M tokens of a Hub
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
    with warnings.catch_warnings(), no_bars():
        warnings.simplefilter(
            "ignore"
        )  # torch's and transformers', for those who program with them
        found = find_models(names, options.revision)
        objective = common_objective(found, pairs=data is not None and data.kind == "pairs")
        most = SPAN_LENGTH if objective == SPANS else LONGEST
        window = common_length(found, f"--window is {options.window}", options.window, most)
        if options.retrieval:
            options = replace(options, retrieval=with_lengths(options.retrieval, found, objective))
        sounds: list[AudioFile] = []
        material = None
        described: JsonObject = {}
        if data is not None:
            described = {"data": asdict(data) | {"tokens_limit": options.tokens}, "context": window}
            if objective == SPEECH:
                sounds = list_audio_files(local_path(data.source), data.split)
            else:
                text = read_documents(
                    data, found[0].tokenizer, options.tokens, partial(progress, "reading")
                )
                material = _text_material(text, found[0], objective, window)
        evaluation = _Evaluation(options, sounds, material, device, progress)
        scores = []
        for candidate in found:
            gc.collect()  # the model before it
            with memory_explained(candidate.name, _LESS):
                scores.append(evaluation.scores_of(candidate))
    return EvaluationFile(
        **measurement("evaluate", command, device),
        **described,
        questions=options.retrieval,
        objective=objective,
        reference=scores.pop(0) if options.reference else None,
        results=scores,
    )


def _text_material(
    text: Sequence[Piece], candidate: Candidate, objective: str, window: int
) -> Material:
    """The text in tokens, which are the same for all models."""
    tokenizer = candidate.tokenizer
    if objective == CAUSAL:
        return text_material(text, tokenizer, window=window)
    start = decoder_start(candidate.folder, candidate.config, tokenizer)
    if objective == SPANS:
        return span_material(text, tokenizer, start=start, length=window)
    begin = None if starts_with_last(candidate.config) else start
    return pair_material(text, tokenizer, start=begin, length=window)


@dataclass
class _Evaluation:
    """Measures models, one after the other, on a text and by questions.

    Attributes:
        options: how text is scored, and what is asked.
        sounds: to score, empty for none.
        material: the text in tokens; None for sound, which every model encodes.
        device: where models run.
        progress: called with the name of a stage, the steps done and the number of steps.
        first: the model that those after it are compared with: its means and its name.
        normal: what gives spoken words one spelling, in the language that this model hears.
        answers: of that model.
        reference: that model, if distributions are compared.
    """

    options: EvaluationOptions
    sounds: Sequence[AudioFile]
    material: Material | None
    device: str
    progress: Progress
    first: tuple[Means, str] | None = None
    normal: Normal | None = None
    answers: list[Question] | None = None
    reference: Scored | None = None

    def scores_of(self, candidate: Candidate) -> ModelScores:
        """A model's entry in the results.

        Raises:
            DataError: the tokenizer does not belong to the model.
        """
        name = candidate.name
        options = self.options
        model = load(candidate, options.dtype, self.device)
        found: dict[str, Any] = {}
        material = self.material
        if self.sounds:
            show = partial(self.progress, f"transcribing with {name}")
            speech = SpeechModel(model, candidate.folder)
            material = speech_material(
                speech, self.sounds, batch=options.batch, tokens=options.tokens, progress=show
            )
            self.normal = self.normal or material.normal
            material = replace(
                material, normal=self.normal
            )  # which language is spoken is for one model to say
        if material is not None:
            check_vocabulary(candidate.config, material.largest, candidate.folder)
            show = partial(self.progress, f"scoring {name}")
            scored = Scored(model, material)
            loss, *kl = score(scored, options.batch, self.reference, show)
            means = measured(material, loss, *kl)
            found = with_errors(means) | {
                "tokens": len(loss),
                "bytes": None if material.sizes is None else int(material.sizes.sum()),
                "scored_nan": int((~np.isfinite(loss)).sum()),
                "note": material.note,
            }
            if self.first is not None:
                found["difference"] = difference(means, *self.first)
            self.first = self.first or (means, name)
            if options.reference:
                self.reference = self.reference or scored
        asked = options.retrieval
        if asked is not None:
            ids = candidate.tokenizer(" ".join(filler()), verbose=False)["input_ids"]
            check_vocabulary(candidate.config, max(ids), candidate.folder)
            show = partial(self.progress, f"asking {name}")
            answers = ask(
                model, candidate.tokenizer, **asked.as_json(), batch=options.batch, progress=show
            )
            found["retrieval"] = shares(answers, self.answers)
            self.answers = self.answers or answers
        return ModelScores(
            **candidate.stated, dtype=str(model.dtype).removeprefix("torch."), **found
        )
