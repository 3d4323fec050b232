"""`gqa_conversion.json`, the record in every converted checkpoint: its fields, and how it is read.

`conversion.provenance` fills it in. `verify` reads the file by itself, since it must not trust what wrote it.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.machine import Machine
from gqa_convert.checkpoint.ownership import RECORD, WRITTEN
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.checkpoint.strict_json import JsonObject, parse_object

PROVENANCE = RECORD
FORMAT_VERSION = 1
"""The format version of the record."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The size and the hash by which a file is recognised later."""

    nbytes: int
    sha256: str | None = None

    def as_json(self) -> JsonObject:
        return {"bytes": self.nbytes} | ({} if self.sha256 is None else {"sha256": self.sha256})


@dataclass(frozen=True, slots=True)
class BeforeAfter:
    """A number of the source and of the result: bytes or parameters."""

    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Divergence:
    """KL(source || student) on held-out text, in nats per token, before and after the stage that trains all layers
    together; equal where that stage did not run.
    """

    before: float
    after: float
    curve: tuple[tuple[int, float], ...] = ()
    """Steps of that stage, and the divergence after them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRecord:
    """The calibration text that a method measured on, and what it did with it."""

    text: str
    """The file, folder or dataset, in words."""
    tokens: int
    sequence_length: int
    seed: int
    steps: int
    """Gradient steps of each layer."""
    digest: str
    """SHA-256 of the tokens."""
    kl_steps: int = 0
    """Steps of the stage that trains all layers together."""
    kl: Divergence | None = None
    """None where it was not measured."""

    def inputs(self) -> JsonObject:
        """What the merged layers depend on."""
        return {
            "text": self.text,
            "tokens": self.tokens,
            "sequence_length": self.sequence_length,
            "seed": self.seed,
            "steps": self.steps,
            "digest": self.digest,
        }

    def as_json(self) -> JsonObject:
        kl = None if self.kl is None else asdict(self.kl)
        return self.inputs() | {"kl_steps": self.kl_steps, "kl": kl}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionRecord:
    """Where a converted checkpoint comes from and how it was made."""

    created: str
    """UTC, as 2025-01-31T12:00:00Z."""
    command: list[str] | None
    """The command line, if there was one."""
    machine: Machine
    source_id: str
    """A folder or a Hub id."""
    source_revision: str | None
    source_fingerprint: str
    """By which results of the source are known; see `fingerprint`."""
    source_files: Mapping[str, FileRecord]
    source_model_type: str
    model_type: str
    """Of the source, in the form in which it was converted; another than `source_model_type` if it was rewritten."""
    method: str
    """The effective method: `copy` or `repeat` where no heads are merged."""
    calibration: CalibrationRecord | None
    heads: int
    """Query heads per layer."""
    source_kv_heads: int
    groups: int | list[int]
    """K/V heads per layer of the result, or those of each layer where layers differ."""
    encoder: bool
    """Whether an encoder's self-attention was converted too."""
    route: str
    """What loads the result, as `Plan.route` names it."""
    parameters: BeforeAfter
    cache_bytes: Mapping[str, BeforeAfter]
    """`kv_bytes_per_token` and `cross_kv_bytes_per_encoder_token`."""
    head_order: Mapping[str, list[int]]
    """By module: the source's K/V heads in the order in which they were merged, where it is not the source's."""
    merge_error: Mapping[str, float]
    """By tensor; or by module and part of it, where whole layers were merged."""
    result_files: Mapping[str, FileRecord] | None
    """The weight files of the result, if they were hashed."""
    previous: Mapping[str, Any] | None
    """The record of the conversion that made the source, unchanged."""
    written: Mapping[str, Any]
    """Every file beside the record, as `ownership.list_written` lists them."""

    def as_json(self) -> JsonObject:
        """The content of the file."""
        return {
            "format_version": FORMAT_VERSION,
            "created": self.created,
            "command": self.command,
            "machine": asdict(self.machine),
            "source": {
                "id": self.source_id,
                "revision": self.source_revision,
                "fingerprint": self.source_fingerprint,
                "model_type": self.source_model_type,
                "files": {name: file.as_json() for name, file in self.source_files.items()},
            },
            "model_type": self.model_type,
            "method": self.method,
            "calibration": None if self.calibration is None else self.calibration.as_json(),
            "heads": self.heads,
            "source_kv_heads": self.source_kv_heads,
            "groups": self.groups,
            "encoder": self.encoder,
            "route": self.route,
            "parameters": asdict(self.parameters),
            **{name: asdict(both) for name, both in self.cache_bytes.items()},
            "head_order": dict(self.head_order),
            "merge_error": dict(self.merge_error),
            "uptraining_tokens": 0,
            "result": None if self.result_files is None else files_as_json(self.result_files),
            "previous": self.previous,
            WRITTEN: dict(self.written),
        }


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """The sizes and SHA-256 of files by their names, sorted; reads them whole."""
    found = {}
    for name in sorted(names):
        with (folder / name).open("rb") as file:
            found[name] = FileRecord((folder / name).stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
    return found


def files_as_json(files: Mapping[str, FileRecord]) -> JsonObject:
    """`{"files": {name: {"bytes": ..., "sha256": ...}}}`."""
    return {"files": {name: file.as_json() for name, file in files.items()}}


def earlier_record(checkpoint: Checkpoint) -> JsonObject | None:
    """The record in a local checkpoint that this program made, as its file has it; None without one.

    Raises:
        CorruptCheckpointError: the file cannot be read.
    """
    if PROVENANCE not in checkpoint.carried:
        return None
    assert checkpoint.folder is not None
    path = checkpoint.folder / PROVENANCE
    return parse_object(path.read_bytes(), str(path))
