"""Carries out a plan: a new checkpoint folder that appears whole or not at all, and its record.

Methods that read no text hold at most one layer.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from gqa_convert.checkpoint.fingerprint import fingerprint
from gqa_convert.checkpoint.provenance import (
    FORMAT_VERSION,
    PROVENANCE,
    CalibrationRecord,
    earlier_record,
)
from gqa_convert.checkpoint.source import Checkpoint, open_local
from gqa_convert.errors import UnsupportedFamilyError
from gqa_convert.publishing.atomic_files import write_json
from gqa_convert.publishing.ownership import WRITTEN, hash_file, list_written
from gqa_convert.publishing.publication import check_destination, staged_folder
from gqa_convert.runtime.json_objects import JsonObject, Result
from gqa_convert.runtime.machine import machine
from gqa_convert.runtime.paths import local_path

from .options import CalibrationOptions, ConversionOptions
from .plan import Plan
from .planning import plan_conversion
from .prepared_layers import PreparedLayers, prepare_layers
from .progress import OnProgress
from .rewriting.source import rewritten_folder
from .writing import Progress, check_room, write_sidecar_files, write_weights

_DEFAULTS = ConversionOptions()
_OF_THE_PLAN = (
    *("model_type", "method", "heads", "source_kv_heads", "kv_heads", "route", "parameters"),
    *("kv_bytes_per_token", "cross_kv_bytes_per_encoder_token"),
)
"""What a record takes from the summary of the plan, which speaks of the form in which the source
was converted.
"""


@dataclass(frozen=True, slots=True)
class ConversionResult(Result):
    """What `convert_checkpoint` did.

    Attributes:
        plan: the plan that was carried out.
        out: the new checkpoint folder.
        out_bytes: the size of all files in it.
        merge_error: relative merge error by tensor, or by attention module where whole layers were
            merged on calibration data.
        calibration: the text that was measured on; None without text.
    """

    plan: Plan
    out: Path
    out_bytes: int
    merge_error: Mapping[str, float]
    calibration: CalibrationRecord | None

    def as_json(self) -> JsonObject:
        """The plan's summary and what only the conversion knows."""
        calibrated = {} if self.calibration is None else {"calibration": self.calibration.as_json()}
        done = {
            "out": str(self.out),
            "out_bytes": self.out_bytes,
            "merge_error": dict(self.merge_error),
        }
        return self.plan.summary() | calibrated | done


def convert_checkpoint(
    source: str | Path,
    out: str | Path,
    kv_heads: int | Sequence[int],
    options: ConversionOptions = _DEFAULTS,
    *,
    prove: Callable[[Path], None] | None = None,
    on_plan: Callable[[Plan], None] = lambda plan: None,
    on_layer: OnProgress = lambda progress: None,
    progress: Progress = lambda nbytes: None,
) -> ConversionResult:
    """Convert a checkpoint to grouped-query attention.

    Args:
        source: a local folder or a Hub id.
        out: the folder to make.
        kv_heads: K/V heads per layer in the result, or those of each attention layer in the order
            of the layers.
        options: the method, its calibration text, and more.
        prove: called with the finished folder of a source whose model type is on no list, before
            `out` appears; what it raises stops the conversion. Such a source is refused without it.
            `gqa_convert.verify.run.prove`, for instance, with the source's name.
        on_plan: called with the plan before anything is written.
        on_layer: called as a method that works on whole layers proceeds, from the rewriting of the
            source on.
        progress: called with every number of weight bytes written.

    Returns:
        The plan, the result's path and size, and the merge error of every changed tensor.

    Raises:
        GQAConvertError: one of its subclasses for every mistake; nothing is left behind then.
    """
    # all that can be refused is, before anything is downloaded or written
    folder = local_path(out)

    def check(opened: Checkpoint) -> tuple[Plan, CalibrationOptions]:
        planned = plan_conversion(opened, kv_heads, options)
        check_destination(folder, opened.folder, overwrite=options.overwrite)
        return planned

    opened = open_local(source, options.revision, check)
    plan, calibration = check(opened)
    previous = earlier_record(opened)
    if not plan.family.listed and prove is None:
        raise UnsupportedFamilyError(
            f"model type {plan.family.model_type} is on no list, and its result must be proved: "
            "pass prove="
        )
    on_plan(plan)
    with ExitStack() as stack:
        # transformers, which runs the source on text, reads its other form from files
        if plan.checkpoint.recipes and calibration.has_data and plan.merge_method.merges_layers:
            rewritten = stack.enter_context(rewritten_folder(plan.checkpoint, folder, on_layer))
            plan = replace(plan, checkpoint=rewritten)
        staged = stack.enter_context(staged_folder(folder))
        check_room("the result", plan.disk_bytes, staged.path)
        merged = prepare_layers(plan, folder, calibration, stack, on_layer)
        errors = write_weights(plan, staged.path, merged.tensors, progress) | merged.errors
        write_sidecar_files(plan, staged.path)
        record = _record(plan, options, replace(merged, errors=errors), previous, staged.path)
        write_json(staged.path / PROVENANCE, record)
        if not plan.family.listed and prove is not None:
            prove(staged.path)
        total = sum(path.stat().st_size for path in staged.path.rglob("*") if path.is_file())
        staged.publish(overwrite=options.overwrite)
    return ConversionResult(plan, folder, total, errors, merged.calibration)


def _record(
    plan: Plan,
    options: ConversionOptions,
    merged: PreparedLayers,
    previous: JsonObject | None,
    folder: Path,
) -> JsonObject:
    """The record of a conversion, as its file has it.

    Args:
        plan: what was done.
        options: of the conversion.
        merged: what was merged before the weights were written, with the errors of all tensors.
        previous: the record of the conversion that made the source, unchanged.
        folder: the result, which is complete but for the record.
    """
    source, stated = plan.checkpoint.origin, plan.summary()
    # methods that work on whole layers take so long that hashing their result costs little
    hash_weights = options.hash_weights or plan.merge_method.merges_layers
    return {
        "format_version": FORMAT_VERSION,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": options.command,
        "machine": asdict(machine(merged.device)),
        "source": {
            "id": source.source_id,
            "revision": source.revision,
            "fingerprint": fingerprint(source),
            "model_type": str(source.config.get("model_type")),
            "files": _files_of(source, hash_weights=options.hash_weights),
        },
        **{key: stated[key] for key in _OF_THE_PLAN if key in stated},
        "calibration": merged.calibration and merged.calibration.as_json(),
        "head_order": merged.head_order,
        "merge_error": merged.errors,
        "uptraining_tokens": 0,
        "previous": previous,
        WRITTEN: list_written(folder, hash_weights=hash_weights),
    }


def _files_of(source: Checkpoint, *, hash_weights: bool) -> JsonObject:
    """The sizes of the source's files, and the hashes of those that are copied, which are small,
    and of the weights if they are asked for.
    """
    skipped = set(source.left_behind)
    if not hash_weights:
        skipped |= {shard.file for shard in source.shards}
    known: JsonObject = {}
    for name, nbytes in sorted(source.sizes.items()):
        is_hashed = name not in skipped
        known[name] = hash_file(source.local_folder / name) if is_hashed else {"bytes": nbytes}
    return known
