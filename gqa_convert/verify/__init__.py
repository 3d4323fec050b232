"""Proves a converted checkpoint against its source.

Nothing here shares code with the converter: tensors are read by the safetensors library, merged again in torch, and
compared bit for bit; then transformers loads both checkpoints and shows that OUT computes what SOURCE computes once
SOURCE's K/V heads are replaced by the merged ones. The claims in OUT say what to check and are checked themselves. Code
that OUT brings along runs only once it is seen to be the package's own.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.paths import local_path
from gqa_convert.errors import ConfigError, CorruptCheckpointError, GQAConvertError, OptionError, SourceNotFoundError
from gqa_convert.families.table import Family, find_family
from gqa_convert.text.scoring.text_to_score import read_file
from gqa_convert.verify import config as configs
from gqa_convert.verify import folder as folders
from gqa_convert.verify.checkpoint_reader import Weights, first_line, read_object
from gqa_convert.verify.folded_tensors import FoldedComparison
from gqa_convert.verify.geometry import Geometry, read_geometry
from gqa_convert.verify.proofs import FOLDING
from gqa_convert.verify.report import Check, Failure, VerificationReport
from gqa_convert.verify.tensors import TensorComparison
from gqa_convert.verify.translated import Translation, is_translated
from gqa_convert.verify.translated_heads import FoldedTranslatedComparison, TranslatedHeads
from gqa_convert.verify.translated_tensors import TranslatedComparison

__all__ = ["Check", "VerificationReport", "verify_checkpoint"]

OnCheck = Callable[[Check], None]
Progress = Callable[[str, int, int], None]
"""Called with a stage (tensors, logits, text), what is done of it and its total: bytes, forward passes, tokens."""


def verify_checkpoint(
    out: str | Path,
    source: str | Path,
    *,
    revision: str | None = None,
    logits: bool = True,
    text: Path | None = None,
    max_text_tokens: int | None = None,
    seed: int = 0,
    on_check: OnCheck = lambda _: None,
    progress: Progress = lambda *_: None,
) -> VerificationReport:
    """Check that `out` is the right conversion of `source`.

    Args:
        out: the converted folder.
        source: the folder or Hub id that it was made from.
        revision: branch, tag or commit on the Hub.
        logits: also load and run both models.
        text: a UTF-8 file on which the loss of both is measured; needs `logits`.
        max_text_tokens: measure on the text's first tokens only.
        seed: of the random tokens that the models are run on.
        on_check: called as each check ends.
        progress: called as work goes on.

    Returns:
        A report; damage to `out`, of whatever kind, is a failed check in it.

    Raises:
        SourceNotFoundError: `out` is no folder, or `source` holds no checkpoint.
        ConfigError: the config of `source` is damaged.
        CorruptCheckpointError: a tensor of `source` cannot be read.
        UnsupportedFamilyError: its model type is not one that can be converted.
        OptionError: the text cannot be read.
    """
    out = local_path(out)
    if not out.is_dir():
        raise SourceNotFoundError(f"{out} is no folder: name the converted checkpoint")
    if text is not None:
        if not logits:
            raise OptionError("a text needs the models to be run: leave out either")
        text = local_path(text)
        _read_text(text)
    origin = _resolve(source, revision)
    original = _source_config(origin)
    family = find_family(original.get("model_type"))
    if text is not None:
        _check_scores_text(family, original)
    weights = Weights(origin, lambda text: CorruptCheckpointError(f"{text}: download or copy the source again"))
    run = _Run(VerificationReport(str(out), str(source)), on_check)
    translation: Translation | None = None
    if is_translated(out, original, folders.claimed_route(out)):
        made: list[Translation] = []

        def route() -> str:
            made.append(Translation(original, out))
            return made[0].describe()

        if not run.check("route", route):
            return run.report
        translation = made[0]
        geometry = _check_translated_data(run, out, family, weights, translation, progress)
    else:
        geometry = _check_data(run, out, family, original, weights, progress)
    claims: dict[str, Any] = {}
    with suppress(Failure):  # reported by the check on provenance
        claims = folders.read_provenance(out)
    if claims.get("result") is not None:
        run.check("hashes", lambda: folders.check_hashes(out, claims))
    if logits and not _has_classes(family):
        run.check(
            "behaviour",
            lambda: (
                f"not run: transformers has no class of type {family.model_type}, and a checkpoint's own code never runs"
            ),
        )
    elif logits:
        from gqa_convert.verify.behaviour import check_behaviour

        check_behaviour(
            run.check,
            run.report,
            out,
            origin,
            family,
            geometry,
            parameters=sum(map(weights.numbers, weights.file_of)),
            own_file=run.own_file,
            method=run.method,
            seed=seed,
            spacing=0.0 if geometry is None else _spacing(weights, geometry),
            translation=translation,
            text=None if text is None else _read_text(text),
            max_text_tokens=max_text_tokens,
            progress=progress,
        )
    return run.report


class _Run:
    """Runs checks one by one and turns whatever they raise into findings."""

    def __init__(self, report: VerificationReport, on_check: OnCheck) -> None:
        self.report = report
        self.method: Any = None
        self.own_file: bool | None = None
        """Whether OUT's modelling file is the package's own; None if OUT should have none."""
        self._on_check = on_check

    def check(self, name: str, function: Callable[[], str]) -> bool:
        """Run a check; it returns its detail, or raises Failure or, on a damaged OUT, anything else."""
        try:
            check = Check(name, True, function())
        except Failure as failure:
            check = Check(name, False, str(failure))
        except (CorruptCheckpointError, ConfigError):  # raised for SOURCE only: the user's mistake
            raise
        except Exception as problem:
            check = Check(name, False, first_line(problem))
        self.report.checks.append(check)
        self._on_check(check)
        return check.passed


def _check_data(
    run: _Run, out: Path, family: Family, original: dict[str, Any], source: Weights, progress: Progress
) -> Geometry | None:
    """All checks on files; returns the geometry unless OUT is too damaged to have one."""
    opened: list[Weights] = []
    claims: dict[str, Any] = {}

    def files() -> str:
        opened.append(Weights(out, Failure))
        return folders.check_files(opened[0], source)

    run.check("files", files)
    found: list[Geometry] = []
    if opened:
        ours = opened[0]

        def heads() -> str:
            found.append(read_geometry(family, original, source, ours))
            return found[0].describe()

        run.check("heads", heads)
    if found:
        geometry, ours = found[0], opened[0]
        total = 0
        try:
            claims = folders.read_provenance(out)
            total = sum(map(ours.nbytes, ours.file_of))
        except Failure:
            pass  # found again, and reported, by the checks below
        encoder = claims.get("encoder") is True if geometry.encoder is None else geometry.encoder
        run.method = folders.judged_method(folders.true_method(claims.get("method", "mean"), geometry), claims)
        seed = claims.get("seed")
        counted = _counted(progress, total)
        comparison: TensorComparison
        if run.method in FOLDING:
            comparison = folded = FoldedComparison(source, ours, geometry, run.method, family, original, counted)
        else:
            comparison = TensorComparison(source, ours, geometry, run.method, seed if type(seed) is int else 0, counted)
        run.check("tensor names", comparison.census)
        run.check("untouched tensors", comparison.untouched)
        same = run.check("merged tensors", comparison.merged)
        if run.method in FOLDING:
            run.check(
                "attention functions", lambda: folded.functions(claims.get("merge_error"), claims.get("head_order"))
            )
        run.check("index", lambda: folders.check_index(ours, source))
        run.check(
            "config",
            lambda: configs.check_config(read_object(out / configs.CONFIG), original, family, geometry, encoder),
        )
        errors = comparison.errors() if same and run.method not in FOLDING else None
        run.check(
            "provenance",
            lambda: folders.check_provenance(folders.read_provenance(out), family, geometry, encoder, source, errors),
        )
    modeling = configs.modelling_file(family, found[0]) if found else family.modeling
    file = f"{modeling.file}.py" if modeling else None
    if modeling and (found or (out / f"{modeling.file}.py").is_file()):
        run.own_file = run.check(
            "modelling file", lambda: configs.check_modelling_file(out, read_object(out / configs.CONFIG), modeling)
        )
    run.check("carried files", lambda: folders.check_carried(out, source.folder, file))
    return found[0] if found else None


def _check_translated_data(
    run: _Run, out: Path, family: Family, source: Weights, translation: Translation, progress: Progress
) -> Geometry | None:
    """The same for an OUT of another model type."""
    opened: list[Weights] = []
    found: list[Geometry] = []
    claims: dict[str, Any] = {}

    def files() -> str:
        opened.append(Weights(out, Failure))
        return folders.check_files(opened[0], source)

    def heads() -> str:
        found.append(translation.read_geometry(source, opened[0]))
        return found[0].describe()

    run.check("files", files)
    if opened and run.check("heads", heads):
        geometry, ours = found[0], opened[0]
        with suppress(Failure):  # reported by its own check
            claims = folders.read_provenance(out)
        run.method = folders.judged_method(folders.true_method(claims.get("method", "mean"), geometry), claims)
        seed = claims.get("seed")
        rewriting = translation.rewrite(source, geometry.after, run.method, seed if type(seed) is int else 0)
        counted = _counted(progress, sum(map(ours.nbytes, ours.file_of)))
        comparison: TranslatedComparison
        if run.method in FOLDING:
            translation.folded = TranslatedHeads(rewriting, ours)
            comparison = folded = FoldedTranslatedComparison(rewriting, ours, counted, translation.folded)
        else:
            comparison = TranslatedComparison(rewriting, ours, counted)
        run.check("tensor names", comparison.census)
        same = run.check("merged tensors", comparison.merged)
        if run.method in FOLDING:
            run.check(
                "attention functions", lambda: folded.functions(claims.get("merge_error"), claims.get("head_order"))
            )
        run.check("rewritten tensors", comparison.rewritten)
        run.check("index", lambda: folders.check_index(ours, source))
        run.check("config", lambda: translation.check_config(read_object(out / configs.CONFIG), geometry.after))
        errors = comparison.errors() if same and run.method not in FOLDING else None
        run.check(
            "provenance",
            lambda: folders.check_provenance(folders.read_provenance(out), family, geometry, False, source, errors),
        )
    run.check("carried files", lambda: folders.check_carried(out, source.folder, None, translation.completed()))
    if translation.completed():
        run.check("tokenizer config", lambda: translation.check_tokenizer_config(out, source.folder))
    return found[0] if found else None


def _counted(progress: Progress, total: int) -> Callable[[int], None]:
    done = 0

    def add(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress("tensors", done, total)

    return add


def _resolve(source: str | Path, revision: str | None) -> Path:
    """The source's local folder; one on the Hub is downloaded."""
    path = local_path(source)
    if path.is_dir():
        if revision is not None:
            raise SourceNotFoundError(
                f"{source} is a local folder, which has no revision {revision!r}: leave --revision out"
            )
        return path
    from gqa_convert.checkpoint.source import open_checkpoint

    folder = open_checkpoint(source, revision=revision, download=True).folder
    assert folder is not None
    return folder


def _source_config(folder: Path) -> dict[str, Any]:
    path = folder / configs.CONFIG
    if not path.is_file():
        raise SourceNotFoundError(f"{folder} has no config.json: name the folder that OUT was made from")
    try:
        return read_object(path)
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{path} cannot be read ({first_line(problem)}): download or copy it again") from None


def _spacing(weights: Weights, geometry: Geometry) -> float:
    """The smallest distance of two numbers in tensors with K/V heads: that of subnormals, 6e-8 in float16 and
    negligible elsewhere.
    """
    import torch

    names = {*geometry.cuts, *(name for _, each in geometry.lists for name in each)}
    return max((torch.finfo(dtype).tiny * torch.finfo(dtype).eps for dtype in map(weights.dtype, names)), default=0.0)


def _has_classes(family: Family) -> bool:
    """Whether transformers has classes for a type: code that lies in checkpoints is the only one for some."""
    return family.native or family.modeling is not None


def _check_scores_text(family: Family, config: dict[str, Any]) -> None:
    from gqa_convert.families.loading import TASKS, auto_class, check_language_model

    if not _has_classes(family) or auto_class(config) != TASKS[0]:
        raise OptionError(
            f"a text's loss is that of a language model that transformers has, which {family.model_type} is not: leave the text out"
        )
    check_language_model("SOURCE", config, "a text's loss is that of one; leave the text out")


def _read_text(path: Path) -> str:
    try:
        return read_file(path)
    except GQAConvertError as problem:
        raise OptionError(str(problem)) from None
