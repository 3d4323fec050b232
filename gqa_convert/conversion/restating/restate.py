"""Writes a checkpoint with custom code as a checkpoint of a stock type that computes the same, or quantised weights
dequantised; the folder appears whole or not at all.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from gqa_convert.checkpoint.ownership import RESTATED, WRITTEN, list_written
from gqa_convert.checkpoint.paths import local_path
from gqa_convert.checkpoint.publication import StagedFolder, check_destination, sweep
from gqa_convert.checkpoint.quantised import QuantisedSourceError
from gqa_convert.checkpoint.results import Result
from gqa_convert.checkpoint.source import open_checkpoint, open_local, whole_folder
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.conversion.restating.dequantised import write_dequantised_checkpoint
from gqa_convert.conversion.restating.pieces import write_pieces
from gqa_convert.conversion.restating.planning import StockPlan, plan_stock
from gqa_convert.conversion.sidecar_files import write_json, write_sidecar_files
from gqa_convert.conversion.writing import Progress
from gqa_convert.errors import GQAConvertError, RemoteCodeError
from gqa_convert.families.loading import read_config
from gqa_convert.families.table import find_family

NEEDED = (RemoteCodeError, QuantisedSourceError)
"""What is raised where a checkpoint is opened or planned that must be rewritten first."""


@dataclass(frozen=True, slots=True)
class RestatedCheckpoint(Result):
    """What `restate_checkpoint` wrote.

    Attributes:
        source, revision: the checkpoint that was restated.
        model_type, result_model_type: of the source and of the result.
        out: the new folder.
        notes: sentences on what differs.
    """

    source: str
    revision: str | None
    model_type: str
    result_model_type: str
    out: str
    notes: tuple[str, ...]

    def record(self) -> JsonObject:
        """The part that the record in the result holds."""
        values = self.as_json()
        return {key: values[key] for key in ("source", "revision", "model_type", "result_model_type")}


def restate_checkpoint(
    source: str | Path,
    out: str | Path,
    *,
    revision: str | None = None,
    overwrite: bool = False,
    on_plan: Callable[[StockPlan], None] = lambda plan: None,
    progress: Progress = lambda nbytes: None,
) -> RestatedCheckpoint:
    """Write `source` as a checkpoint that transformers' own classes load, with as many K/V heads as before.

    Args:
        source: a local folder or a Hub id, of one of the types in `families.RESTATED` or with quantised weights that
            transformers can dequantise.
        out: the folder to make.
        revision: branch, tag or commit on the Hub.
        overwrite: replace an existing checkpoint folder once the new one is complete.
        on_plan: called before anything is written, of a source with custom code.
        progress: called with every number of weight bytes written.

    Returns:
        Both model types, the folder, and notes on what differs.

    Raises:
        GQAConvertError: one of its subclasses for every mistake; nothing is left behind then.
    """
    out = local_path(out)
    try:
        checkpoint = open_local(source, revision, plan_stock)
    except QuantisedSourceError as found:
        method = found.method
        folder, commit = whole_folder(source, revision)
        return _write(
            out,
            folder,
            str(source),
            commit,
            lambda staged: write_dequantised_checkpoint(folder, str(source), method, staged),
            overwrite,
        )
    plan = plan_stock(checkpoint)
    check_destination(out, checkpoint.folder, overwrite=overwrite)
    on_plan(plan)
    sweep(Path(os.path.realpath(out)).parent)
    with ExitStack() as stack:
        staged = stack.enter_context(StagedFolder(out))
        write_pieces(plan, staged.path, {}, progress)
        write_sidecar_files(plan, staged.path)  # type: ignore[arg-type]
        made = RestatedCheckpoint(
            checkpoint.source_id,
            checkpoint.revision,
            plan.record.model_type,
            plan.record.stock,
            str(out),
            tuple(plan.notes),
        )
        write_json(staged.path / RESTATED, made.record() | {WRITTEN: list_written(staged.path)})
        staged.publish(overwrite=overwrite)
    return made


def _write(
    out: Path,
    folder: Path,
    source_id: str,
    revision: str | None,
    write: Callable[[Path], tuple[str, ...]],
    overwrite: bool,
) -> RestatedCheckpoint:
    """Write a dequantised checkpoint.

    Args:
        out: the folder to make.
        folder: that of the source.
        source_id, revision: the source.
        write: fills an empty folder, and returns sentences on what differs.
        overwrite: as for `restate_checkpoint`.
    """
    check_destination(out, folder, overwrite=overwrite)
    sweep(Path(os.path.realpath(out)).parent)
    with StagedFolder(out) as staged:
        notes = write(staged.path)
        model_type = str(read_config(staged.path).get("model_type"))
        made = RestatedCheckpoint(source_id, revision, model_type, model_type, str(out), notes)
        write_json(staged.path / RESTATED, made.record() | {WRITTEN: list_written(staged.path)})
        staged.publish(overwrite=overwrite)
    return made


def must_be_restated(source: str | Path, revision: str | None) -> bool:
    """Return whether a checkpoint can be converted only after it is rewritten; other mistakes are not reported."""
    try:
        find_family(open_checkpoint(source, revision=revision).config.get("model_type"))
    except NEEDED:
        return True
    except GQAConvertError:
        return False
    return False


@contextmanager
def restated(
    source: str | Path, revision: str | None, out: Path, on_note: Callable[[str], None]
) -> Iterator[RestatedCheckpoint]:
    """Rewrite `source` into a hidden folder beside `out`, which goes at the end of the context.

    Args:
        source, revision: as for `restate_checkpoint`.
        out: a folder on the disk that has room.
        on_note: called with sentences on what is done and what differs.
    """
    on_note(f"{source} is rewritten for stock classes in a folder beside {out}, which is deleted afterwards")
    sweep(Path(os.path.realpath(out)).parent)
    with StagedFolder(out) as scratch:
        made = restate_checkpoint(source, scratch.path / "source", revision=revision)
        (Path(made.out) / RESTATED).unlink()  # it has times, and would be copied into the result
        for note in made.notes:
            on_note(note)
        yield made
