"""`gqa_conversion.json`: where a converted checkpoint comes from and how it was made."""

import hashlib
import time
from collections.abc import Iterable
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Any

from gqa_convert.checkpoint.machine import machine
from gqa_convert.checkpoint.ownership import RECORD, WRITTEN
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.checkpoint.strict_json import parse_object
from gqa_convert.conversion.plan import Plan

PROVENANCE = RECORD

_CHUNK = 1 << 20


class FileHasher:
    """SHA-256 of the source's files, computed beside the conversion in a thread that an error or a signal ends.

    Args:
        checkpoint: a local source.
        weights: hash the weight files too; without it only everything else, which costs nothing.
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
        """Name -> hexadecimal digest; waits for the last one."""
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


def earlier_record(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The record that a local checkpoint brings along, if it was made by this program.

    Raises:
        CorruptCheckpointError: it can't be read.
    """
    if PROVENANCE not in checkpoint.carried:
        return None
    assert checkpoint.folder is not None
    path = checkpoint.folder / PROVENANCE
    return parse_object(path.read_bytes(), str(path))


def record_files(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """What is recorded of files by which they are known again: `{"files": {name: {"bytes": ..., "sha256": ...}}}`;
    reads them whole.
    """
    found = {}
    for name in sorted(names):
        with (folder / name).open("rb") as file:
            found[name] = {
                "bytes": (folder / name).stat().st_size,
                "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
            }
    return {"files": found}


def provenance(
    plan: Plan,
    errors: dict[str, float],
    digests: dict[str, str],
    command: list[str] | None,
    *,
    calibration: dict[str, Any] | None = None,
    head_order: dict[str, list[int]] | None = None,
    result: dict[str, Any] | None = None,
    previous: dict[str, Any] | None = None,
    written: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The record of a conversion.

    Args:
        plan: what was done.
        errors: relative merge error by tensor, or by module and part of it where whole layers were merged.
        digests: SHA-256 of source files, for as many as are known.
        command: the command line, if there was one.
        calibration: what text was measured on, if any was.
        head_order: of the modules whose K/V heads, with the query heads that read them, have changed places: the
            source's heads, [K], in
            the result's order before those of a group became one.
        result: of `record_files`, for the weights that were written, if they were read again.
        previous: the record of the conversion that made the source.
        written: of `list_written`, for the files beside the record.

    Returns:
        Plain data.
    """
    checkpoint = plan.checkpoint
    return {
        "format_version": 1,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": command,
        "machine": machine(),
        "source": {
            "id": checkpoint.source_id,
            "revision": checkpoint.revision,
            "files": {
                name: {"bytes": checkpoint.sizes[name]} | ({"sha256": digests[name]} if name in digests else {})
                for name in sorted(checkpoint.sizes)
            },
        },
        "model_type": plan.family.model_type,
        "method": plan.effective_method,
        "seed": plan.seed if plan.merge_method.seeded else None,
        "calibration": calibration,
        "heads": plan.heads,
        "source_kv_heads": plan.source_kv_heads,
        "groups": plan.groups,
        "encoder": any(layer.attention_kind == "encoder" for layer in plan.layers),
        "route": plan.route,
        **plan.cache_bytes(),
        "head_order": head_order or {},
        "merge_error": errors,
        "uptraining_tokens": 0,
        "result": result,
        "previous": previous,
        WRITTEN: written,
    }
