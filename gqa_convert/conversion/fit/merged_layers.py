"""Keeps merged layers on disk until the result is written, one file each, so that a killed run resumes.

A layer's file holds its tensors as the result has them: K/V heads once, in the result's types.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.checkpoint.atomic_files import atomic_file, sync
from gqa_convert.checkpoint.dtypes import DTYPES
from gqa_convert.checkpoint.headers import LENGTH_BYTES, Header, TensorEntry, build_header, header_length, parse_header
from gqa_convert.checkpoint.locks import lock_folder
from gqa_convert.conversion.fit.records import (
    LayerRecord,
    TrainingRecord,
    layer_from_json,
    training_from_json,
)
from gqa_convert.errors import CorruptCheckpointError, InterruptedRunError, OutputError

Array = npt.NDArray[Any]
_STATE = "state.json"
_RECORD = "record"
_LAYERS = "layers"
_FINISH = "finish.json"


class MergedLayers:
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
        self._fingerprint = json.dumps(dict(fingerprint), sort_keys=True)
        self._keep = keep
        self._handle: int | None = None

    def __enter__(self) -> "MergedLayers":
        self.path.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # a filesystem without locks
            self._handle = lock_folder(self.path)
            if self._handle is None:
                raise OutputError(
                    f"another run is making {self._out} ({self.path} is locked): wait for it, or name another folder"
                )
        for path in self.path.iterdir():
            if path.is_dir():  # activations of a run that was killed
                shutil.rmtree(path, ignore_errors=True)
        state = self.path / _STATE
        if not state.is_file() or state.read_text(encoding="utf-8") != self._fingerprint:
            for path in (*self.path.glob("layer-*"), *self.path.glob("finished-*"), self.path / _FINISH):
                path.unlink(missing_ok=True)
            state.write_text(self._fingerprint, encoding="utf-8")
            sync(state)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        kept = self._keep and any(self.path.glob("layer-*"))
        if kind is None or not kept:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._handle is not None:
            os.close(self._handle)
        if kept and isinstance(error, InterruptedRunError):
            stopped = str(error).partition(":")[0]
            raise InterruptedRunError(
                f"{stopped}: merged layers are kept in {self.path}, and the same command resumes from there"
            ) from None

    def record(self, number: int) -> LayerRecord | None:
        """The record of a finished layer; None for one that is not finished."""
        header = self._header(number)
        return None if header is None else layer_from_json(json.loads(header.metadata[_RECORD]))

    def read(self, number: int) -> dict[str, Array]:
        """The tensors of a finished layer, as the result has them."""
        header = self._header(number)
        assert header is not None
        data = np.memmap(self._file(number), np.uint8, "r")
        return {
            name: data[entry.start : entry.start + entry.nbytes].view(DTYPES[entry.dtype]).reshape(entry.shape)
            for name, entry in header.tensors.items()
        }

    def write(self, number: int, tensors: Mapping[str, Array], record: LayerRecord) -> None:
        """Store a layer; once this returns, a kill cannot lose it."""
        names = {dtype: name for name, dtype in DTYPES.items()}
        described = ((name, names[array.dtype], array.shape, array.nbytes) for name, array in tensors.items())
        self._put(
            self._file(number), build_header(described, {_RECORD: json.dumps(record.as_json())}), tensors.values()
        )

    def finish(self, layers: Mapping[int, Mapping[str, Array]], record: TrainingRecord) -> None:
        """Replace tensors of finished layers, all at once or not at all.

        Args:
            layers: their tensors, by their numbers; the others stay.
            record: of the training, for `finished`.
        """
        for number, tensors in layers.items():
            described = self._header(number)
            assert described is not None
            entries = (
                (name, described.tensors[name].dtype, array.shape, array.nbytes) for name, array in tensors.items()
            )
            self._put(self._finished(number), build_header(entries, described.metadata), tensors.values())
        finish = {_LAYERS: sorted(layers), _RECORD: record.as_json()}
        self._put(self.path / _FINISH, json.dumps(finish).encode(), ())

    def reopen(self) -> None:
        """Undo `finish`."""
        (self.path / _FINISH).unlink(missing_ok=True)

    def finished(self) -> TrainingRecord | None:
        """The record of `finish`, or None before it."""
        finish = self._finish()
        return None if finish is None else training_from_json(finish[_RECORD])

    def _finish(self) -> dict[str, Any] | None:
        path = self.path / _FINISH
        return json.loads(path.read_bytes()) if path.is_file() else None

    def _put(self, path: Path, head: bytes, arrays: Iterable[Array]) -> None:
        with atomic_file(path, self.path / "partial") as file:
            file.write(head)
            for array in arrays:
                file.write(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)

    def tensors(self, count: int) -> dict[str, tuple[Path, TensorEntry]]:
        """The tensors of the first `count` layers, those that there are, by name: the file and the entry of each."""
        found: dict[str, tuple[Path, TensorEntry]] = {}
        for number in range(count):
            header = self._header(number)
            if header is not None:
                found |= {name: (self._file(number), entry) for name, entry in header.tensors.items()}
        return found

    def _file(self, number: int) -> Path:
        finish = self._finish()
        if finish is not None and number in finish[_LAYERS]:
            return self._finished(number)
        return self.path / f"layer-{number:05d}.safetensors"

    def _finished(self, number: int) -> Path:
        return self.path / f"finished-{number:05d}.safetensors"

    def _header(self, number: int) -> Header | None:
        path = self._file(number)
        if not path.is_file():
            return None
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = header_length(file.read(LENGTH_BYTES), size, str(path))
                return parse_header(file.read(length), size, str(path))
        except CorruptCheckpointError:  # a disk that failed: the layer is made again
            return None
