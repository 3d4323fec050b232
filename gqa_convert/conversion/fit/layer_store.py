"""Keeps merged layers on disk until the result is written, so that a killed run resumes.

Each layer is one safetensors file with its tensors as the result has them: K/V heads once, in the result's types. The
layer's record is JSON in the metadata of the file.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from gqa_convert.checkpoint.atomic_files import write_whole
from gqa_convert.checkpoint.dtypes import DTYPES
from gqa_convert.checkpoint.headers import LENGTH_BYTES, Header, TensorEntry, header_length, parse_header
from gqa_convert.checkpoint.locks import try_lock
from gqa_convert.checkpoint.provenance import Divergence
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.errors import CorruptCheckpointError, InterruptedRunError, OutputError

Array = npt.NDArray[Any]
EMPTY: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecord:
    """A merged layer."""

    module: str
    """The attention module, as the checkpoint names it."""
    errors: dict[str, float]
    """Relative errors in root mean square, by their names in `gqa_conversion.json`: of the attention scores (`keys`) and of
    what the values contribute (`values`), or on calibration data of the target output (`output`).
    """
    head_order: list[int] | None = None
    """The source's K/V heads in the order in which they were merged; None where every head keeps its place."""
    gap_left: float | None = None
    """The share of mean pooling's squared error that remains, against the source's attention of the same inputs; None
    without calibration data.
    """
    first_low_frequency_pair: int | None = None
    """The rotary pair from which on positions are ignored; None where keys have no rotary pairs, or are averaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecord:
    """The stage that trains all layers together, once it has ended."""

    request: JsonObject
    """What the stage depends on beside the layers: another request begins it again."""
    kl_steps: int
    """0 where the stage was left out, or where the divergence was too small to be worth its time."""
    kl: Divergence

    @property
    def helped(self) -> bool:
        """Whether the stage has changed the layers."""
        return self.kl.after < self.kl.before


class LayerStore:
    """A hidden folder beside the result, locked while it is open.

    Args:
        out: the folder that the result will have.
        fingerprint: what the layers depend on: source, method, data. Layers of another fingerprint are thrown away.
        keep: whether the layers stay when an error or a signal ends the work, so that the next run resumes.

    Raises:
        OutputError: another run has locked it.
    """

    def __init__(self, out: Path, fingerprint: Mapping[str, Any], *, keep: bool) -> None:
        real = Path(os.path.realpath(out))
        self.path = real.parent / f".{real.name}.gqa-merging"
        self._out = out
        self._fingerprint = json.dumps(dict(fingerprint), sort_keys=True).encode()
        self._keep = keep
        self._lock: int | None = None
        self._training = self.path / "training.json"

    def __enter__(self) -> "LayerStore":
        self._lock = self._take_lock()
        for path in self.path.iterdir():
            if path.is_dir():  # what a killed run had written for itself
                shutil.rmtree(path, ignore_errors=True)
        state = self.path / "state.json"
        if not state.is_file() or state.read_bytes() != self._fingerprint:
            self.reopen()
            for path in self.path.glob("*.safetensors"):
                path.unlink()
            write_whole(state, self._fingerprint)
        return self

    def _take_lock(self) -> int | None:
        """A descriptor that holds the lock; None on a file system without locks."""
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                lock = try_lock(self.path / "lock")
            except FileNotFoundError:  # its holder has just removed the folder
                continue
            except OSError:
                return None
            if lock is None:
                raise OutputError(
                    f"another run is making {self._out} ({self.path} is locked): wait for it, or name another folder"
                )
            return lock

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        kept = error is not None and self._keep and any(self.path.glob("layer-*"))
        if not kept:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        if kept and isinstance(error, InterruptedRunError):
            stopped = str(error).partition(":")[0]
            raise InterruptedRunError(
                f"{stopped}: merged layers are kept in {self.path}, and the same command resumes from there"
            ) from None

    def record(self, number: int) -> LayerRecord | None:
        """The record of a finished layer; None for one that is not finished."""
        header = self._header(number)
        return None if header is None else LayerRecord(**json.loads(header.metadata["record"]))

    def read(self, number: int) -> dict[str, Array]:
        """The tensors of a finished layer, as the result has them."""
        header = self._header(number)
        assert header is not None
        data = np.memmap(self._file(number), np.uint8, "r")
        found = {}
        for name, entry in header.tensors.items():
            content = data[entry.start : entry.start + entry.nbytes]
            found[name] = content.view(DTYPES[entry.dtype]).reshape(entry.shape)
        return found

    def locate(self, count: int) -> dict[str, tuple[Path, TensorEntry]]:
        """The files of all tensors of the first `count` layers, and where in them each tensor lies, by name."""
        found: dict[str, tuple[Path, TensorEntry]] = {}
        for number in range(count):
            header = self._header(number)
            tensors = {} if header is None else header.tensors
            for name, entry in tensors.items():
                found[name] = self._file(number), entry
        return found

    def write(self, number: int, tensors: Mapping[str, Array], record: LayerRecord) -> None:
        """Store a layer; once this returns, a kill cannot lose it."""
        self._put(self._named("layer", number), tensors, record)

    def finish(
        self, training: TrainingRecord, layers: Sequence[Mapping[str, Array]] = (), errors: Mapping[str, float] = EMPTY
    ) -> None:
        """Replace all layers by trained ones, all at once or not at all.

        Args:
            training: what `finished` returns from now on.
            layers: the tensors of every layer; not needed where `training` has not helped, so that the layers stay.
            errors: of the trained layers, by their names in `gqa_conversion.json`.
        """
        for number, tensors in enumerate(layers):
            record = self.record(number)
            assert record is not None
            own = {name: error for name, error in errors.items() if name.rpartition(".")[0] == record.module}
            self._put(self._named("trained", number), tensors, replace(record, errors=own, gap_left=None))
        write_whole(self._training, json.dumps(asdict(training)).encode())

    def finished(self) -> TrainingRecord | None:
        """The record of `finish`, or None before it."""
        if not self._training.is_file():
            return None
        fields = json.loads(self._training.read_bytes())
        fields["kl"] = Divergence(**fields["kl"])
        return TrainingRecord(**fields)

    def reopen(self) -> None:
        """Undo `finish`."""
        self._training.unlink(missing_ok=True)

    def _file(self, number: int) -> Path:
        training = self.finished()
        return self._named("trained" if training is not None and training.helped else "layer", number)

    def _named(self, kind: str, number: int) -> Path:
        return self.path / f"{kind}-{number:05d}.safetensors"

    def _put(self, path: Path, tensors: Mapping[str, Array], record: LayerRecord) -> None:
        arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        write_whole(path, save(arrays, {"record": json.dumps(asdict(record))}))

    def _header(self, number: int) -> Header | None:
        """The header of a finished layer's file; None where there is none, or where a failing disk has damaged it."""
        path = self._file(number)
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                length = header_length(file.read(LENGTH_BYTES), size, path.name)
                return parse_header(file.read(length), size, path.name)
        except (FileNotFoundError, CorruptCheckpointError):
            return None


def recorded_order(order: npt.NDArray[np.intp]) -> list[int] | None:
    """An order of heads as records hold it."""
    return None if (order == np.arange(len(order))).all() else order.tolist()
