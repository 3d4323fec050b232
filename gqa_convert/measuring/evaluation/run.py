"""Evaluates several models on the same text: everything except the forward passes."""

import gc
import hashlib
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gqa_convert.checkpoint.devices import chosen_device
from gqa_convert.checkpoint.machine import measurement
from gqa_convert.errors import LaunchError, OptionError
from gqa_convert.families.loading import no_bars
from gqa_convert.measuring.evaluation import candidates
from gqa_convert.measuring.evaluation.candidates import CAUSAL, SPANS, Candidate
from gqa_convert.measuring.evaluation.page import check_drawings, draw
from gqa_convert.measuring.results import EvaluationFile, ModelScores, ScoredText, check_result_path, write_result
from gqa_convert.text.decoder_start import decoder_start, starts_with_last
from gqa_convert.text.hub_rows import commit_of
from gqa_convert.text.sources import Source, is_on_hub
from gqa_convert.text.token_files import default_cache
from gqa_convert.training.distributed import check_environment, gathered, join, taking_part, together

if TYPE_CHECKING:
    from gqa_convert.measuring.evaluation.comparison import Measured
    from gqa_convert.text.scoring.material import Material

Progress = Callable[[str, int, int], None]
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class EvaluationOptions:
    """How models are evaluated, and which files are written.

    Attributes:
        reference: a model whose predicted distributions the others are compared with; it stays in memory beside each of
            them. By default losses alone are compared, with the first model's.
        revision: of models that are Hub ids.
        window: tokens of a window or of an encoder's input; None for the models' positions up to 2048, and 512 for
            span corruption.
        stride: tokens between windows; None for the window.
        tokens: maximum number of tokens of text, or of pairs; None for whole files, and for 1M tokens of a Hub
            dataset.
        batch: windows or examples at a time.
        dtype: see `candidates.load`.
        device: the first GPU by default, or a GPU for each of several processes; the CPU where there is none.
        seed: of span corruption.
        output: a JSON file for the results.
        overwrite: replace that file.
        html: a page to draw.
        plot: a picture to draw.
        earlier: files of earlier results, which are drawn too.
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
    output: Path | None = None
    overwrite: bool = False
    html: Path | None = None
    plot: Path | None = None
    earlier: Sequence[Path] = ()


def evaluate(
    models: Sequence[str],
    data: Source,
    options: EvaluationOptions | None = None,
    *,
    command: list[str] | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> EvaluationFile | None:
    """Evaluate models on the same text, with all processes of a launch together.

    Args:
        models: folders and Hub ids.
        data: the text.
        options: how to score it, and which files to write.
        command: the command line, for the record.
        progress: called with the name of a stage, the steps done and the number of steps.

    Returns:
        The results on the main process, None on the others.

    Raises:
        GQAConvertError: one of its subclasses for models, text, options or a launch that can't be evaluated.
    """
    options = options or EvaluationOptions()
    _check(models, data, options)
    names = [*([options.reference] if options.reference else []), *models]
    with warnings.catch_warnings(), taking_part(), no_bars():
        warnings.simplefilter("ignore")  # torch's and transformers', for those who program with them
        processes = _join(options.device)
        if not processes.is_main_process:
            progress = _no_progress
        run = _Run(options, processes, progress)
        with together(processes):
            earlier = check_drawings(options.html, options.plot, options.earlier)
            if options.output is not None:
                check_result_path(options.output, "evaluate", overwrite=options.overwrite)
            run.find(names, data)
            text = run.read(data) if processes.is_main_process else None
        run.text = gathered(processes, text)[0]
        scores = run.score_models()
        with together(processes):
            if not processes.is_main_process:
                return None
            found = EvaluationFile(
                **measurement("evaluate", command, str(processes.device)).as_json(),
                data=_described(data, options, run.text),
                objective=run.objective,
                context=run.window,
                stride=run.stride,
                dtype=options.dtype,
                seed=options.seed,
                processes=processes.num_processes,
                reference=scores.pop(0) if options.reference else None,
                results=scores,
            )
            if options.output is not None:
                write_result(options.output, found, overwrite=options.overwrite)
            draw([*earlier, found], options.html, options.plot)
            return found


def _check(models: Sequence[str], data: Source, options: EvaluationOptions) -> None:
    if not models:
        raise OptionError("there is no MODEL: name at least one")
    if (data.source_field is None) != (data.target_field is None):
        raise OptionError("--source-field and --target-field need each other: give both or neither")
    for option, value in (("--tokens", options.tokens), ("--batch", options.batch)):
        if value is not None and value < 1:
            raise OptionError(f"{option} is {value}, expected a number above 0")
    if options.dtype not in DTYPES:
        raise OptionError(f"--dtype is {options.dtype!r}: give one of {', '.join(DTYPES)}")


def _no_progress(stage: str, done: int, total: int) -> None:
    pass


def _join(device: str | None) -> Any:
    """This process among those of the launch: accelerate's Accelerator, or the same attributes for a single process."""
    check_environment(os.environ)
    chosen = chosen_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return SimpleNamespace(num_processes=1, process_index=0, is_main_process=True, device=chosen)
    if device not in (None, "cpu", "cuda"):
        raise OptionError(f"--device is {device}, which several processes would share: leave it out, for a GPU each")
    import torch

    if chosen != "cpu" and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count():
        raise LaunchError("there are more processes here than GPUs: start one for each, or use --device cpu")
    return join(cpu=chosen == "cpu")


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
    """One run, on this process. The reference, if there is one, is the first model."""

    models: Sequence[Candidate]
    objective: str
    window: int
    stride: int | None
    text: Any

    def __init__(self, options: EvaluationOptions, processes: Any, progress: Progress) -> None:
        self.options, self.processes, self.progress = options, processes, progress

    def find(self, names: Sequence[str], data: Source) -> None:
        """Check everything that can be checked before a model is loaded."""
        options = self.options
        self.models = candidates.find_models(names, options.revision)
        self.objective = candidates.common_objective(self.models, pairs=data.holds_pairs)
        self.window, self.stride = candidates.common_window(self.models, self.objective, options.window, options.stride)

    def read(self, data: Source) -> Any:
        """The text, which is the same for all models."""
        from gqa_convert.text.scoring.text_to_score import read_pairs, read_pieces

        show = partial(self.progress, "reading")
        if data.source_field and data.target_field:
            return read_pairs(data, (data.source_field, data.target_field), self.options.tokens, show)
        return read_pieces(data, self.models[0].tokenizer, self.options.tokens, show)

    def score_models(self) -> list[ModelScores]:
        """The scores of one model after the other; all are compared with the first."""
        from gqa_convert.measuring.evaluation.comparison import model_scores

        first = reference = None
        found = []
        for candidate in self.models:
            is_reference = reference is not None and candidate.folder.samefile(self.models[0].folder)
            model = reference if is_reference else self._load(candidate)
            measured = self._score(candidate, model, first, reference)
            found.append(model_scores(measured, first))
            if first is None:
                first = measured
                reference = model if self.options.reference else None
            del model
        return found

    def _load(self, candidate: Candidate) -> Any:
        import torch

        gc.collect()  # the model before it
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        with together(self.processes):
            return candidates.load(candidate, self.options.dtype, str(self.processes.device))

    def _score(self, candidate: Candidate, model: Any, first: "Measured | None", reference: Any) -> "Measured":
        """A model's scores.

        Args:
            candidate: the model.
            model: the same, loaded.
            first: scores of the model that it is compared with.
            reference: that model, loaded, if its distributions are compared.
        """
        from gqa_convert.measuring.evaluation.comparison import Measured, incomparable
        from gqa_convert.text.scoring.forward import Scores, score

        processes, done = self.processes, 0

        def advance(scored: int) -> None:
            nonlocal done
            done = min(material.tokens, done + scored * processes.num_processes)
            self.progress(f"scoring {candidate.name}", done, material.tokens)

        with together(processes), candidates.memory_explained(candidate.name):
            material = self._material(candidate)
            candidates.check_tokens(candidate, model, int(material.ids.max()))
            problem = None if first is None else incomparable(candidate, material, first)
            beside = None if problem else reference
            own = range(processes.process_index, len(material.batches), processes.num_processes)
            began = time.monotonic()
            scores = score(model, material.batches, len(material.ids), numbers=own, reference=beside, progress=advance)
            seconds = round(time.monotonic() - began, 3)
        # every element is nonzero in one process at most, so that nothing is rounded
        parts = gathered(processes, scores.arrays())
        scores = Scores(*(sum(arrays) for arrays in zip(*parts, strict=True)))
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
