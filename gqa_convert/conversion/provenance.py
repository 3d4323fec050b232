"""Fills in the record of a conversion, and hashes the source's files for it."""

import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Any

from gqa_convert.checkpoint.fingerprint import fingerprint
from gqa_convert.checkpoint.machine import machine
from gqa_convert.checkpoint.provenance import BeforeAfter, CalibrationRecord, ConversionRecord, FileRecord
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.conversion.plan import Plan

_CHUNK = 1 << 20


class FileHasher:
    """Computes the SHA-256 of the source's files in a thread beside the conversion, which an error or a signal ends.

    Args:
        checkpoint: a local source.
        weights: whether to hash the weight files too; the others are small.
    """

    def __init__(self, checkpoint: Checkpoint, *, weights: bool) -> None:
        assert checkpoint.folder is not None
        self._folder: Path = checkpoint.folder
        large = {shard.file for shard in checkpoint.shards}
        self._names = [
            name for name in checkpoint.sizes if name not in checkpoint.left_behind and (weights or name not in large)
        ]
        self._digests: dict[str, str] = {}
        self._problem: OSError | None = None
        self._stop = Event()
        self._thread = Thread(target=self._run, daemon=True)

    def __enter__(self) -> "FileHasher":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def digests(self) -> dict[str, str]:
        """The hexadecimal digests by file name; waits for the last one."""
        self._thread.join()
        if self._problem:
            raise self._problem
        return self._digests

    def _run(self) -> None:
        buffer = bytearray(_CHUNK)
        try:
            for name in self._names:
                digest = hashlib.sha256()
                with (self._folder / name).open("rb", buffering=0) as file:
                    while (count := file.readinto(buffer)) and not self._stop.is_set():
                        digest.update(memoryview(buffer)[:count])
                self._digests[name] = digest.hexdigest()
        except OSError as problem:
            self._problem = problem


def record_conversion(
    plan: Plan,
    source: Checkpoint,
    errors: Mapping[str, float],
    digests: Mapping[str, str],
    command: list[str] | None,
    *,
    calibration: CalibrationRecord | None,
    head_order: Mapping[str, list[int]],
    device: str,
    result: Mapping[str, FileRecord] | None,
    previous: Mapping[str, Any] | None,
    written: Mapping[str, Any],
) -> ConversionRecord:
    """The record of a conversion.

    Args:
        plan: what was done.
        source: a local checkpoint, as the user named it; that of the plan may be rewritten.
        errors: relative merge error by tensor, or by module and part of it where whole layers were merged.
        digests: SHA-256 of as many source files as are known.
        command: the command line, if there was one.
        calibration: the text that was measured on, if any was.
        head_order: by module: the source's K/V heads in the order in which they were merged, where it is not the
            source's.
        device: on which the text was measured; the CPU without text.
        result: the weight files that were written, if they were hashed.
        previous: the record of the conversion that made the source.
        written: of `list_written`, for the files beside the record.
    """
    assert source.folder is not None
    return ConversionRecord(
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        command=command,
        machine=machine(device),
        source_id=source.source_id,
        source_revision=source.revision,
        source_fingerprint=fingerprint(source.folder),
        source_files={name: FileRecord(source.sizes[name], digests.get(name)) for name in sorted(source.sizes)},
        source_model_type=str(source.config.get("model_type")),
        model_type=plan.family.model_type,
        method=plan.effective_method,
        calibration=calibration,
        heads=plan.heads,
        source_kv_heads=plan.source_kv_heads,
        groups=plan.stated_groups,
        encoder=any(layer.attention_kind == "encoder" for layer in plan.layers),
        route=plan.route,
        parameters=BeforeAfter(plan.parameters_before, plan.parameters_after),
        cache_bytes=plan.cache_bytes(),
        head_order=head_order,
        merge_error=errors,
        result_files=result,
        previous=previous,
        written=written,
    )
