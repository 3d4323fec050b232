"""Evaluates several models on the same text: everything except the forward passes."""

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gqa_convert.checkpoint.machine import measurement
from gqa_convert.checkpoint.paths import local_path
from gqa_convert.errors import OptionError
from gqa_convert.families.loading import no_bars
from gqa_convert.measuring.evaluate.models import (
    CAUSAL,
    DTYPES,
    PAIRS,
    SPANS,
    Candidate,
    check_languages,
    check_tokens,
    common_context,
    common_objective,
    find_models,
    memory_explained,
    opened,
)
from gqa_convert.measuring.evaluate.results import check_output, write_results
from gqa_convert.measuring.results.schemas import EvaluationFile, Head, ModelScores, ScoredText
from gqa_convert.text.sources import Source

if TYPE_CHECKING:
    from gqa_convert.measuring.evaluate.comparison import Measured
    from gqa_convert.measuring.evaluate.processes import Processes
    from gqa_convert.text.scoring.forward import Floats, Scores
    from gqa_convert.text.scoring.material import Material

Progress = Callable[[str, int, int], None]

_FIGURES = frozenset(ModelScores.model_fields) - {"model", "revision", "dtype", "scored_nan"}
"""The fields of a model's scores that are null where they do not apply."""


@dataclass(frozen=True)
class Settings:
    """How models are evaluated.

    Attributes:
        context: tokens of a window or of an encoder's input; None for the models' positions up to 2048, and 512 for
            span corruption.
        stride: tokens between windows; None for the context.
        tokens: maximum number of tokens of text, or of pairs; None for whole files, and for 1,048,576 tokens of a Hub
            dataset.
        batch: windows or examples at a time.
        dtype: see `models.opened`.
        device: see `processes.come_together`.
        seed: of span corruption.
        pairs: the fields of source and target, for pairs.
    """

    context: int | None = None
    stride: int | None = None
    tokens: int | None = None
    batch: int = 4
    dtype: str = "auto"
    device: str | None = None
    seed: int = 0
    pairs: tuple[str, str] | None = None


def evaluate(
    models: Sequence[str],
    data: Source,
    settings: Settings | None = None,
    *,
    reference: str | None = None,
    revision: str | None = None,
    output: Path | None = None,
    overwrite: bool = False,
    command: list[str] | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> EvaluationFile | None:
    """Evaluate models on the same text, with all processes of a launch together.

    Args:
        models: folders and Hub ids.
        data: the text.
        settings: how to score it.
        reference: a model whose predicted distributions the others are compared with; it stays in memory beside each of
            them.
        revision: of models that are Hub ids.
        output: a JSON file for the results.
        overwrite: replace that file.
        command: the command line, for the record.
        progress: called with the name of a stage, the steps done and the number of steps.

    Returns:
        The results on the main process, None on the others.

    Raises:
        GQAConvertError: one of its subclasses for models, text, options or a launch that can't be evaluated.
    """
    settings = settings or Settings()
    output = None if output is None else local_path(output)
    _check(models, settings)
    from gqa_convert.measuring.evaluate.processes import come_together
    from gqa_convert.training.distributed import taking_part

    with warnings.catch_warnings(), taking_part(), no_bars():
        warnings.simplefilter("ignore")  # torch's and transformers', for those who program with them
        processes = come_together(settings.device)
        run = _Run(processes, settings, progress if processes.is_main_process else lambda stage, done, total: None)
        with run.together():
            if output is not None and processes.is_main_process:
                check_output(output, overwrite=overwrite)
            run.open(models, reference, revision)
        results = run.go(data)
        with run.together():
            if not processes.is_main_process:
                return None
            head = Head.model_validate(measurement("evaluate", command, processes.device).as_json())
            results = results.headed(head)
            if output is not None:
                write_results(output, results, overwrite=overwrite)
            return results


def failed(results: EvaluationFile) -> list[str]:
    """The models with losses that are not finite."""
    reference = [results.reference] if results.reference else []
    return [str(each.model) for each in (*results.results, *reference) if each.scored_nan]


def _check(models: Sequence[str], settings: Settings) -> None:
    if not models:
        raise OptionError("there is no MODEL: name at least one")
    for option, value in (("--tokens", settings.tokens), ("--batch", settings.batch)):
        if value is not None and value < 1:
            raise OptionError(f"{option} is {value}, expected a number above 0")
    if settings.dtype not in DTYPES:
        raise OptionError(f"--dtype is {settings.dtype!r}: give one of {', '.join(DTYPES)}")


class _Run:
    """One run, on this process."""

    def __init__(self, processes: "Processes", settings: Settings, progress: Progress) -> None:
        from gqa_convert.training.distributed import together

        self.processes, self.settings, self.progress = processes, settings, progress
        self.together = partial(together, processes)
        self.objective, self.context = CAUSAL, 0
        self.stride: int | None = None
        self.text: Any = None
        self.made: dict[Path, Material] = {}

    def open(self, models: Sequence[str], reference: str | None, revision: str | None) -> None:
        """Check everything that can be checked before a model is loaded."""
        found = find_models([*models, *([] if reference is None else [reference])], revision)
        self.models, self.reference = found[: len(models)], found[-1] if reference is not None else None
        self.objective = common_objective(found, pairs=self.settings.pairs is not None)
        if self.objective == PAIRS:
            check_languages(found)
        self.context, self.stride = common_context(found, self.objective, self.settings.context, self.settings.stride)

    def go(self, data: Source) -> EvaluationFile:
        """The scores of one model after the other, without the head of the file."""
        self.text = self._read(data)
        kept: Measured | None = None
        results: list[ModelScores] = []
        with ExitStack() as stack:
            beside: _Reference | None = None
            if self.reference is not None:
                with self.together():
                    model = stack.enter_context(opened(self.reference, self.settings.dtype, self.processes.device))
                    beside = _Reference(self.reference, model, self._unscored(self.reference, model))
            for candidate in self.models:
                with ExitStack() as inner:
                    if beside and candidate.folder == beside.candidate.folder:
                        model = beside.model
                    else:
                        with self.together():
                            model = inner.enter_context(opened(candidate, self.settings.dtype, self.processes.device))
                    result, measured = self._evaluated(candidate, model, kept, beside)
                    del model
                results.append(result)
                kept = kept or measured
            entry = (
                None if beside is None else self._entry(beside.candidate, beside.model, beside.measured, beside.seconds)
            )
        return EvaluationFile(
            data=self._description(data),
            objective=self.objective,
            context=self.context or None,
            stride=self.stride,
            dtype=self.settings.dtype,
            seed=self.settings.seed,
            processes=self.processes.num_processes,
            reference=entry,
            results=tuple(results),
        )

    def _description(self, data: Source) -> ScoredText:
        pairs = self.settings.pairs
        described = ScoredText(
            source=data.source,
            split=data.split,
            name=data.name,
            revision=data.revision,
            text_field=data.text_field if pairs is None else None,
            tokens_limit=self.settings.tokens,
        )
        if pairs is None:
            return described
        more = {"source_field": pairs[0], "target_field": pairs[1]}
        return described.model_copy(update=more)

    def _read(self, data: Source) -> Any:
        """The text, which the first process reads for all processes."""
        from gqa_convert.text.scoring.text_to_score import read_pairs, read_pieces

        text: Any = None
        with self.together():
            if self.processes.is_main_process:
                show = partial(self.progress, "reading")
                if self.settings.pairs is not None:
                    text = read_pairs(data, self.settings.pairs, self.settings.tokens, show)
                else:
                    text = read_pieces(data, self.models[0].tokenizer, self.settings.tokens, show)
        return self.processes.broadcast(text)

    def _material(self, candidate: Candidate) -> "Material":
        from gqa_convert.measuring.evaluate.examples import pair_material, span_material
        from gqa_convert.text.scoring.texts import text_material

        settings, show = self.settings, partial(self.progress, f"tokenising for {candidate.name}")
        if self.objective == CAUSAL:
            assert self.stride is not None
            return text_material(
                self.text,
                candidate.tokenizer,
                context=self.context,
                stride=self.stride,
                batch=settings.batch,
                progress=show,
            )
        start = candidate.decoder_start()
        if self.objective == SPANS:
            return span_material(
                self.text,
                candidate.tokenizer,
                start=start,
                length=self.context,
                batch=settings.batch,
                seed=settings.seed,
            )
        assert self.objective == PAIRS
        return pair_material(
            self.text,
            candidate.tokenizer,
            start=start,
            starts_with_last=candidate.starts_with_last,
            context=self.context,
            batch=settings.batch,
            progress=show,
        )

    def _evaluated(
        self, candidate: Candidate, model: Any, other: "Measured | None", reference: "_Reference | None"
    ) -> tuple[ModelScores, "Measured"]:
        """A model's entry in the results and the scores behind it.

        Args:
            candidate: the model.
            model: the same, loaded.
            other: scores of the model that it is compared with, where there is no reference.
            reference: the model whose distributions are compared with its. It is scored in the same pass if it has no
                scores yet, and alone if the two can't be compared.
        """
        from gqa_convert.measuring.evaluate import comparison

        with self.together():
            measured = self._unscored(candidate, model)
        against = reference.measured if reference else other
        problem = comparison.incomparable(measured, against) if against else None
        if reference is not None and problem and not reference.is_scored:
            scores, reference.seconds = self._scores(reference.candidate, reference.model, reference.measured, None)
            reference.take(scores.loss)
        scores, seconds = self._scores(
            candidate, model, measured, None if problem or reference is None else reference.model
        )
        measured = replace(measured, scores=scores)
        if reference is not None and not reference.is_scored and scores.reference_loss is not None:
            reference.take(scores.reference_loss)
            reference.seconds = seconds
        against = reference.measured if reference else other
        entry = self._entry(candidate, model, measured, seconds).model_copy(
            update={
                "difference": against and comparison.difference(measured, against),
                "note": self._note(measured, problem),
            }
        )
        return entry, measured

    def _entry(self, candidate: Candidate, model: Any, measured: "Measured", seconds: float | None) -> ModelScores:
        """A model's entry in the results, without comparisons."""
        from gqa_convert.measuring.evaluate import comparison

        entry = ModelScores(
            model=candidate.name,
            revision=candidate.revision,
            dtype=str(model.dtype).removeprefix("torch."),
            **dict.fromkeys(_FIGURES),
            scored_nan=0,
        )
        found = asdict(comparison.losses(measured)) | asdict(comparison.distance(measured))
        return entry.model_copy(update=found | {"seconds": seconds, "note": self._note(measured, None)})

    def _note(self, measured: "Measured", problem: str | None) -> str | None:
        """A note for the user.

        Args:
            measured: a model's scores.
            problem: why they can't be compared with those of the reference.
        """
        notes = []
        if problem:
            how = "not compared" if measured.material.sizes is None else "compared by bits per byte alone"
            notes.append(f"{how}, since {problem}")
        if measured.material.truncated:
            notes.append(f"{measured.material.truncated} pairs were cut to {self.context} tokens")
        return "; ".join(notes) or None

    def _unscored(self, candidate: Candidate, model: Any) -> "Measured":
        """What a model is scored on, with no scores yet."""
        from gqa_convert.measuring.evaluate.comparison import Measured
        from gqa_convert.text.scoring.forward import Scores

        material = self._material(candidate)
        check_tokens(model, material, candidate)
        return Measured(candidate.name, material, Scores(_none()), candidate.tokenizer.get_vocab())

    def _scores(self, candidate: Candidate, model: Any, measured: "Measured", reference: Any) -> tuple["Scores", float]:
        """A model's scores on its material, and the seconds that scoring took.

        Args:
            candidate: the model.
            model: the same, loaded.
            measured: what it is scored on.
            reference: a loaded model that is scored in the same pass.
        """
        from gqa_convert.text.scoring.forward import Scores, score

        material, done = measured.material, 0

        def advance(scored: int) -> None:
            nonlocal done
            done = min(material.tokens, done + scored * self.processes.num_processes)
            self.progress(f"scoring {candidate.name}", done, material.tokens)

        with self.together():
            began = time.monotonic()
            with memory_explained(candidate.name):
                scores = score(
                    model,
                    material.batches,
                    len(material.ids),
                    numbers=self.processes.share(len(material.batches)),
                    reference=reference,
                    progress=advance,
                )
        return Scores(*map(self.processes.joined, scores.arrays())), round(time.monotonic() - began, 3)


class _Reference:
    """The model whose distributions the others' are compared with. It stays in memory, and is scored once.

    Attributes:
        candidate: the model.
        model: the same, loaded.
        measured: its scores, of length 0 before it is scored.
        seconds: how long the pass took that scored it.
    """

    def __init__(self, candidate: Candidate, model: Any, measured: "Measured") -> None:
        self.candidate, self.model, self.measured = candidate, model, measured
        self.seconds: float | None = None

    @property
    def is_scored(self) -> bool:
        return self.seconds is not None

    def take(self, losses: "Floats") -> None:
        """Keep the losses of its tokens."""
        from gqa_convert.text.scoring.forward import Scores

        self.measured = replace(self.measured, scores=Scores(losses))


def _none() -> Any:
    import numpy as np

    return np.empty(0, np.float32)
