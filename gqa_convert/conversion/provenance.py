"""Fills in the record of a conversion."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.fingerprint import fingerprint
from gqa_convert.checkpoint.machine import machine
from gqa_convert.checkpoint.ownership import list_written
from gqa_convert.checkpoint.provenance import BeforeAfter, ConversionRecord, FileRecord, files_as_json, hash_files
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.conversion.fit.run import PreparedLayers
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.plan import Plan


def record_conversion(
    plan: Plan,
    options: ConversionOptions,
    merged: PreparedLayers,
    errors: Mapping[str, float],
    previous: Mapping[str, Any] | None,
    folder: Path,
) -> ConversionRecord:
    """The record of a conversion.

    Args:
        plan: what was done.
        options: of the conversion.
        merged: layers that were merged before the weights were written.
        errors: relative merge error by tensor, or by module and part of it where whole layers were merged.
        previous: the record of the conversion that made the source.
        folder: the result, which is complete but for the record.
    """
    source = plan.checkpoint.origin
    assert source.folder is not None
    result = None
    # methods that work on whole layers take so long that hashing their result costs little
    if options.hash_weights or merged.errors is not None:
        result = hash_files(folder, (file.file for file in plan.files))
    return ConversionRecord(
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        command=options.command,
        machine=machine(merged.device),
        source_id=source.source_id,
        source_revision=source.revision,
        source_fingerprint=fingerprint(source.folder),
        source_files=_source_files(source, source.folder, weights=options.hash_weights),
        source_model_type=str(source.config.get("model_type")),
        model_type=plan.family.model_type,
        method=plan.effective_method,
        calibration=merged.calibration,
        heads=plan.heads,
        source_kv_heads=plan.source_kv_heads,
        groups=plan.stated_groups,
        encoder=any(layer.attention_kind == "encoder" for layer in plan.layers),
        route=plan.route,
        parameters=BeforeAfter(plan.parameters_before, plan.parameters_after),
        cache_bytes=plan.cache_bytes(),
        head_order=merged.head_order,
        merge_error=errors,
        result_files=result,
        previous=previous,
        written=list_written(folder, None if result is None else files_as_json(result)),
    )


def _source_files(source: Checkpoint, folder: Path, *, weights: bool) -> dict[str, FileRecord]:
    """The files of the source; those that are copied, which are small, are hashed, and the weights if asked for."""
    shards = {shard.file for shard in source.shards}
    hashed = [name for name in source.sizes if name not in source.left_behind and (weights or name not in shards)]
    known = {name: FileRecord(nbytes) for name, nbytes in source.sizes.items()} | hash_files(folder, hashed)
    return dict(sorted(known.items()))
