"""Keeps merged layers on disk until the result is written, so that a killed run resumes.

Each layer is one safetensors file with its tensors: K/V heads once, as they are published. Its
record is JSON in the metadata of the file. The last stage is one more such file, with the trained
tensors of all layers.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from gqa_convert.errors import InterruptedRunError, OutputError
from gqa_convert.processes import by_first
from gqa_convert.publishing.atomic_files import write_whole
from gqa_convert.publishing.locks import try_lock
from gqa_convert.runtime.json_objects import JsonObject

Array = npt.NDArray[Any]

TOGETHER = "together"
"""The name under which the stage that trains all layers together is stored."""
HALFWAY = "halfway"
"""The name under which what that stage has come to is stored every few minutes."""


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """A merged layer.

    Attributes:
        module: the attention module, as the checkpoint names it.
        errors: the relative error in root mean square of the target output on calibration data, by
            its name in `gqa_conversion.json`; empty without calibration data.
        head_order: the source's K/V heads in the order in which they were merged.
        error_vs_mean: the share of mean pooling's squared error that remains, against the source's
            attention of the same inputs; None without calibration data.
    """

    module: str
    errors: dict[str, float]
    head_order: list[int]
    error_vs_mean: float | None = None


def layer_key(number: int) -> str:
    """The name under which a layer of a plan is stored."""
    return f"layer-{number:05d}"


class LayerStore:
    """A hidden folder beside the result, locked while it is open.

    Args:
        out: the folder that the result will have.
        fingerprint: what the layers depend on, such as source and method.
        keep: whether the layers stay when an error or a signal ends the work, so that the next run
            resumes.

    Raises:
        OutputError: another run has locked it, or it holds layers that depend on something else.
    """

    def __init__(self, out: Path, fingerprint: Mapping[str, Any], *, keep: bool) -> None:
        real = Path(os.path.realpath(out))
        self.path = real.parent / f".{real.name}.gqa-merging"
        self._out, self._keep = out, keep
        self._fingerprint = fingerprint
        self._state: JsonObject = {}
        """What a killed run has settled; later this run too."""
        self._lock: int | None = None

    def __enter__(self) -> "LayerStore":
        self._lock = self._take_lock()
        try:
            self._prepare()
        except BaseException as error:
            self._keep = True  # what is there belongs to the run that it refuses to go on with
            self.__exit__(type(error), error, None)
            raise
        return self

    def _prepare(self) -> None:
        """Read what a killed run has settled, if it has stored anything."""
        state = self.path / "state.json"
        if any(self.path.glob("*.safetensors")):
            self._state = {"fingerprint": {}} | (
                json.loads(state.read_bytes()) if state.is_file() else {}
            )
        for path in self.path.iterdir():
            if path.is_dir():  # what a killed run had written for itself
                shutil.rmtree(path, ignore_errors=True)
        self.check("fingerprint", self._fingerprint)

    def settle(self, name: str, value: Any) -> Any:
        """What the run that began this work has decided, which whoever resumes it obeys.

        Args:
            name: of the decision.
            value: of this run, plain data. It counts where nothing is decided yet.
        """
        if name not in self._state:
            self._state[name] = json.loads(json.dumps(value))
            write_whole(self.path / "state.json", json.dumps(self._state).encode())
        return self._state[name]

    def check(self, name: str, wanted: Mapping[str, Any]) -> None:
        """Settle what stored layers depend on, and refuse to go on with layers that depend on
        something else.

        Raises:
            OutputError: they do.
        """
        # as it is read back
        wanted = json.loads(json.dumps(wanted))
        settled = self.settle(name, wanted)
        differing = [key for key in {**settled, **wanted} if settled.get(key) != wanted.get(key)]
        if differing:
            count = len([*self.path.glob("*.safetensors")])
            raise OutputError(
                f"{self.path} keeps {count} merged layers of an interrupted run with another "
                f"{', '.join(differing)}: repeat that run's command to go on with it, delete this "
                "folder, or name another OUT"
            )

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
                    f"another run is making {self._out} ({self.path} is locked): wait for it, or "
                    "name another folder"
                )
            return lock

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        kept = error is not None and self._keep and any(self.path.glob("*.safetensors"))
        if not kept:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        if kept and isinstance(error, InterruptedRunError):
            stopped = str(error).partition(":")[0]
            raise InterruptedRunError(
                f"{stopped}: merged layers are kept in {self.path}, and the same command resumes "
                "from there"
            ) from None

    def write(self, name: str, tensors: Mapping[str, Array], record: JsonObject) -> None:
        """Store tensors and their record; once this returns, a kill cannot lose them."""
        arrays = {key: np.ascontiguousarray(array) for key, array in tensors.items()}
        write_whole(self._file(name), save(arrays, {"record": json.dumps(record)}))

    def record(self, name: str) -> JsonObject | None:
        """What `write` was given; None where nothing is stored, or where a failing disk has damaged
        it.
        """
        try:
            with safe_open(self._file(name), "np") as stored:
                record: JsonObject = json.loads(stored.metadata()["record"])
                return record
        except (FileNotFoundError, SafetensorError):
            return None

    def layer(self, number: int) -> LayerRecord | None:
        """The record of a layer of a plan; None where it is not merged yet."""
        record = self.record(layer_key(number))
        return None if record is None else LayerRecord(**record)

    def read(self, name: str) -> dict[str, Array]:
        """The stored tensors."""
        found: dict[str, Array] = load_file(self._file(name))
        return found

    def read_one(self, name: str, key: str) -> Array:
        """One of the stored tensors."""
        with safe_open(self._file(name), "np") as stored:
            array: Array = stored.get_tensor(key)
            return array

    def read_result(self, number: int) -> dict[str, Array]:
        """The tensors of a layer of a plan as the result has them: those of the last stage where it
        changed them.
        """
        found = self.read(layer_key(number))
        if self.record(TOGETHER) is not None:
            with safe_open(self._file(TOGETHER), "np") as stored:
                found |= {name: stored.get_tensor(name) for name in stored.keys() & found.keys()}
        return found

    def files(self, name: str) -> dict[str, Path]:
        """By the names of stored tensors, their file."""
        with safe_open(self._file(name), "np") as stored:
            return dict.fromkeys(stored.keys(), self._file(name))

    def discard(self, name: str) -> None:
        """Forget what is stored under a name, if anything is."""
        self._file(name).unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.safetensors"


class SharedStore:
    """The store of the first process, which all processes of a run read and this one writes.

    Args:
        store: None on the other processes.
    """

    def __init__(self, store: LayerStore | None) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        """A method of `LayerStore`, which every process calls, and which returns what it returned
        on the first one.
        """
        return lambda *arguments: by_first(lambda: getattr(self._store, name)(*arguments))
