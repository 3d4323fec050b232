"""Evaluates several models on the same text: everything except the forward passes."""

import gc
import hashlib
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from gqa_convert.checkpoint.devices import chosen_device
from gqa_convert.checkpoint.machine import measurement
from gqa_convert.errors import LaunchError, OptionError
from gqa_convert.families.loading import no_bars
from gqa_convert.measuring.evaluation import candidates
from gqa_convert.measuring.evaluation.candidates import CAUSAL, SPANS, Candidate
from gqa_convert.measuring.results import EvaluationFile, ModelScores, ScoredText
from gqa_convert.text.decoder_start import decoder_start, starts_with_last
from gqa_convert.text.hub_rows import commit_of
from gqa_convert.text.sources import Source, is_on_hub
from gqa_convert.text.token_files import default_cache

if TYPE_CHECKING:
    from gqa_convert.measuring.evaluation.comparison import Measured
    from gqa_convert.text.scoring.material import Material

Progress = Callable[[str, int, int], None]
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
        stride: tokens between windows of causal models; None for the window.
        tokens: maximum number of tokens of text, or of pairs; None for whole files, and for 1M tokens of a Hub
            dataset.
        batch: windows or examples at a time.
        dtype: see `candidates.load`.
        device: the first GPU by default; the CPU where there is none.
        seed: of span corruption.
    """

    reference: str | None = None
    revision: str | None = None
    window: int | None = None
    stride: int | None = None
    tokens: int | None = None
    batch: int = 4
    dtype: str = "auto"
    device: str | None = None
    seed: int = 0


def evaluate(
    models: Sequence[str],
    data: Source,
    options: EvaluationOptions | None = None,
    *,
    command: list[str] | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> EvaluationFile:
    """Evaluate models on the same text.

    Args:
        models: folders and Hub ids.
        data: the text.
        options: how to score it.
        command: the command line, for the record.
        progress: called with the name of a stage, the steps done and the number of steps.

    Raises:
        GQAConvertError: one of its subclasses for models, text or options that can't be evaluated.
    """
    options = options or EvaluationOptions()
    _check(models, data, options)
    names = list(models)
    if options.reference is not None:
        names.insert(0, options.reference)
    with warnings.catch_warnings(), no_bars():
        warnings.simplefilter("ignore")  # torch's and transformers', for those who program with them
        run = _Run(names, data, options, progress)
        scores = run.score_models()
    return EvaluationFile(
        **measurement("evaluate", command, run.device).as_json(),
        data=_described(data, options, run.text),
        objective=run.objective,
        context=run.window,
        stride=run.stride,
        dtype=options.dtype,
        seed=options.seed,
        reference=scores.pop(0) if options.reference else None,
        results=scores,
    )


def _check(models: Sequence[str], data: Source, options: EvaluationOptions) -> None:
    if not models:
        raise OptionError("there is no MODEL: name at least one")
    if (data.source_field is None) != (data.target_field is None):
        raise OptionError("--source-field and --target-field need each other: give both or neither")
    for name in ("tokens", "batch", "window", "stride"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise OptionError(f"--{name} is {value}, expected a number above 0")
    if options.dtype not in DTYPES:
        raise OptionError(f"--dtype is {options.dtype!r}: give one of {', '.join(DTYPES)}")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise LaunchError("evaluate is one process: start it without torchrun or accelerate launch")


def _described(data: Source, options: EvaluationOptions, text: Any) -> ScoredText:
    digest = hashlib.sha256()
    for part in text:
        digest.update(repr(tuple(part)).encode())
    field = None if data.holds_pairs else data.text_field
    read = {"text_field": field, "tokens_limit": options.tokens, "sha256": digest.hexdigest()}
    if is_on_hub(data):
        read["revision"] = commit_of(data.source, data.revision, default_cache(), ask=False)
    return ScoredText.model_validate(asdict(data) | read)


class _Run:
    """What all models of a run share: the text and how it is read. The reference, if there is one, is the first model."""

    def __init__(self, names: Sequence[str], data: Source, options: EvaluationOptions, progress: Progress) -> None:
        """Check everything that can be checked before a model is loaded, and read the text."""
        from gqa_convert.text.scoring.text_to_score import read_pairs, read_pieces

        self.options, self.progress = options, progress
        self.device = chosen_device(options.device)
        self.models = candidates.find_models(names, options.revision)
        self.objective = candidates.common_objective(self.models, pairs=data.holds_pairs)
        self.window, self.stride = candidates.common_window(self.models, self.objective, options.window, options.stride)
        show = partial(progress, "reading")
        self.text: Any
        if data.source_field and data.target_field:
            self.text = read_pairs(data, (data.source_field, data.target_field), options.tokens, show)
        else:
            self.text = read_pieces(data, self.models[0].tokenizer, options.tokens, show)

    def score_models(self) -> list[ModelScores]:
        """The scores of one model after the other; all are compared with the first."""
        from gqa_convert.measuring.evaluation.comparison import model_scores

        first = reference = None
        found = []
        for candidate in self.models:
            gc.collect()  # the model before it
            model = candidates.load(candidate, self.options.dtype, self.device)
            measured = self._score(candidate, model, first, reference)
            found.append(model_scores(measured, first))
            if first is None:
                first = measured
                reference = model if self.options.reference else None
            del model
        return found

    def _score(self, candidate: Candidate, model: Any, first: "Measured | None", reference: Any) -> "Measured":
        """A model's scores.

        Args:
            candidate: the model.
            model: the same, loaded.
            first: scores of the model that it is compared with.
            reference: that model, loaded, if its distributions are compared.
        """
        from gqa_convert.measuring.evaluation.comparison import Measured, incomparable
        from gqa_convert.text.scoring.forward import score

        done = 0

        def advance(scored: int) -> None:
            nonlocal done
            done += scored
            self.progress(f"scoring {candidate.name}", done, material.tokens)

        with candidates.memory_explained(candidate.name):
            material = self._material(candidate)
            candidates.check_tokens(candidate, model, int(material.ids.max()))
            problem = None if first is None else incomparable(candidate, material, first)
            beside = None if problem else reference
            began = time.monotonic()
            scores = score(model, material.batches, len(material.ids), reference=beside, progress=advance)
            seconds = round(time.monotonic() - began, 3)
        return Measured(candidate, str(model.dtype).removeprefix("torch."), material, scores, seconds, problem)

    def _material(self, candidate: Candidate) -> "Material":
        """The tokens of the text, in batches."""
        from gqa_convert.text.scoring.examples import pair_material, span_material
        from gqa_convert.text.scoring.texts import text_material

        text, tokenizer, length, batch = self.text, candidate.tokenizer, self.window, self.options.batch
        show = partial(self.progress, f"tokenising for {candidate.name}")
        if self.objective == CAUSAL:
            stride = self.stride or length
            return text_material(text, tokenizer, context=length, stride=stride, batch=batch, progress=show)
        start = decoder_start(candidate.folder, candidate.config, tokenizer)
        if self.objective == SPANS:
            return span_material(text, tokenizer, start=start, length=length, batch=batch, seed=self.options.seed)
        first = None if starts_with_last(candidate.config) else start
        return pair_material(text, tokenizer, start=first, length=length, batch=batch, progress=show)
