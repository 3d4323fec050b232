"""Runs a verification: reads the inputs, checks what is stored, then what the models compute."""

from collections.abc import Callable
from pathlib import Path

from gqa_convert.errors import UnsupportedFamilyError

from .config import check_config, check_provenance
from .files import check_copied, check_hashes, open_result
from .inputs import Progress, read_inputs
from .models import check_models
from .report import VerificationReport
from .result import Result
from .tensors import check_headers, check_merged, check_spans, check_untouched


def _show_nothing(*_: object) -> None:
    """By default."""


def verify_checkpoint(
    out: str | Path,
    source: str | Path | None = None,
    *,
    revision: str | None = None,
    logits: bool = True,
    on_note: Callable[[str], None] = _show_nothing,
    progress: Progress = _show_nothing,
) -> VerificationReport:
    """Check that `out` is the correct conversion of `source`.

    Args:
        out: the converted folder.
        source: the folder or the Hub id that it was made from; None for the one that its record
            names.
        revision: branch, tag or commit on the Hub.
        logits: also load and run both models.
        on_note: called with sentences about a SOURCE that is rewritten first.
        progress: called with the progress of the work.

    Returns:
        A report. Damage to `out` of any kind is a failed check in it.

    Raises:
        SourceNotFoundError: `out` or `source` is no checkpoint, or `out` was made from another
            source.
        ConfigError: the config of `source` is damaged.
        CorruptCheckpointError: a tensor of `source` cannot be read.
        UnsupportedFamilyError: the model type of `source` cannot be converted.
        OptionError: no stock class computes what SOURCE does.
    """
    with read_inputs(out, source, revision, on_note) as inputs:
        report = VerificationReport(str(inputs.out), inputs.named.source_id)
        weights = report.check("files", open_result, inputs.out)
        result: Result | None = weights and report.check("heads", Result, inputs, weights)
        if not result:
            return report
        if report.check("tensor headers", check_headers, result):
            report.check("untouched tensors", check_untouched, result, progress)
            is_merged = report.check("merged tensors", check_merged, result, progress)
            if is_merged and result.folds:
                report.check("spans", check_spans, result)
        report.check("config", check_config, result)
        report.check("provenance", check_provenance, result)
        report.check("copied files", check_copied, result)
        if inputs.claims:
            report.check("hashes", check_hashes, result)
        if logits:
            check_models(report, result, progress)
        return report


def prove(source: str | Path, revision: str | None, folder: Path) -> None:
    """Verify a result whose model type is on no list, before it appears.

    Args:
        source: the folder or the Hub id of the source.
        revision: branch, tag or commit on the Hub.
        folder: of the result.

    Raises:
        UnsupportedFamilyError: a check does not hold.
    """
    report = verify_checkpoint(folder, source, revision=revision)
    for check in report.checks:
        if not check.passed:
            raise UnsupportedFamilyError(
                f"{source} has a model type that is on no list, and its result failed the "
                f"proof ({check.name}: {check.detail}): nothing is written"
            )
