"""Makes the record of a conversion."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.fingerprint import fingerprint
from gqa_convert.checkpoint.provenance import FORMAT_VERSION
from gqa_convert.conversion.fitting import PreparedLayers
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.plan import Plan
from gqa_convert.publishing.ownership import WRITTEN, hash_files, list_written
from gqa_convert.runtime.json_objects import JsonObject
from gqa_convert.runtime.machine import machine

_OF_THE_PLAN = (
    *("model_type", "method", "heads", "source_kv_heads", "groups", "route", "parameters"),
    *("kv_bytes_per_token", "cross_kv_bytes_per_encoder_token"),
)
"""What a record takes from the summary of the plan, which speaks of the form in which the source was converted."""


def record_conversion(
    plan: Plan,
    options: ConversionOptions,
    merged: PreparedLayers,
    errors: Mapping[str, float],
    previous: Mapping[str, Any] | None,
    folder: Path,
) -> JsonObject:
    """The record of a conversion, as its file has it.

    Args:
        plan: what was done.
        options: of the conversion.
        merged: layers that were merged before the weights were written.
        errors: relative merge error by tensor, or by module and part of it where whole layers were merged.
        previous: the record of the conversion that made the source, unchanged.
        folder: the result, which is complete but for the record.
    """
    source, stated, result = plan.checkpoint.origin, plan.summary(), None
    # files that are copied are small and hashed, weights if asked for
    shards = {shard.file for shard in source.shards}
    hashed = [
        name
        for name in source.sizes
        if name not in source.left_behind and (options.hash_weights or name not in shards)
    ]
    known = {name: {"bytes": nbytes} for name, nbytes in source.sizes.items()} | hash_files(
        source.local_folder, hashed
    )
    # methods that work on whole layers take so long that hashing their result costs little
    if options.hash_weights or merged.errors is not None:
        result = {"files": hash_files(folder, [file.file for file in plan.files])}
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
            "files": dict(sorted(known.items())),
        },
        **{key: stated[key] for key in _OF_THE_PLAN if key in stated},
        "calibration": merged.calibration and merged.calibration.as_json(),
        "encoder": "encoder" in [layer.attention_kind for layer in plan.layers],
        "head_order": dict(merged.head_order),
        "merge_error": dict(errors),
        "uptraining_tokens": 0,
        "result": result,
        "previous": previous,
        WRITTEN: list_written(folder, result),
    }
