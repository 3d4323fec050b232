"""The proof of a result whose model type is on no list, before the result appears."""

from collections.abc import Callable
from pathlib import Path

from gqa_convert.errors import UnsupportedFamilyError
from gqa_convert.verify.run import verify_checkpoint


def prover(source: str | Path, revision: str | None = None) -> Callable[[Path], None]:
    """What `convert_checkpoint` takes as `prove`.

    Args:
        source: the folder or the Hub id of the source.
        revision: branch, tag or commit on the Hub.
    """

    def prove(folder: Path) -> None:
        report = verify_checkpoint(folder, source, revision=revision)
        for check in report.checks:
            if not check.passed:
                raise UnsupportedFamilyError(
                    f"{source} has a model type that is on no list, and its result failed the proof ({check.name}: "
                    f"{check.detail}): nothing is written; docs/developing.md says how to add the type"
                )

    return prove
