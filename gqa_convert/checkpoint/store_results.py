"""Results in object stores: made in a scratch folder on the disk, then uploaded, with what makes them loadable last.

A store cannot rename a folder. So `config.json` is deleted first and uploaded last but one, and a marker under the
address says which objects an unfinished upload may hold, for whoever finds it.
"""

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from gqa_convert.checkpoint import formats
from gqa_convert.checkpoint.atomic_files import write_json
from gqa_convert.checkpoint.locks import try_lock
from gqa_convert.checkpoint.ownership import RECORD, WRITTEN, some
from gqa_convert.checkpoint.paths import cache_folder, local_path
from gqa_convert.checkpoint.stores import Store, StoredObject, address_digest, store_address
from gqa_convert.checkpoint.strict_json import JsonObject, parse_object
from gqa_convert.checkpoint.transfers import OnBytes, move_files
from gqa_convert.errors import CorruptCheckpointError, InterruptedRunError, OutputError, UploadError

_LAST = (formats.SAFETENSORS_INDEX, "config.json", RECORD)
"""What is uploaded after everything else, in this order."""

_MARKER = ".gqa-convert-upload.json"
"""An object that exists during an upload: which run's it is, and which objects it may write or delete."""

_LOCK = ".lock"
"""A file in the scratch folder that a run holds."""


class StoreResult:
    """A context that holds the scratch folder of a result, alone among the processes of this machine.

    Args:
        address: of the result, from `stores.store_address`.
        overwrite: whether an earlier result may be replaced.

    Attributes:
        folder: where the result is to be made.

    Raises:
        OutputError: there are objects under the address that may not be replaced, or another process makes the result.
        GQAConvertError: as of `stores.Store`.
    """

    def __init__(self, address: str, *, overwrite: bool) -> None:
        self.address = address
        self._overwrite = overwrite
        self._scratch = scratch_folder(address).parent
        self.folder = scratch_folder(address)
        self._state_file = self._scratch / "upload.json"
        self._state: JsonObject = {}
        self._store = Store(address)
        self._handle: int | None = None
        self._uploaded = False

    def __enter__(self) -> "StoreResult":
        self._scratch.mkdir(parents=True, exist_ok=True)
        try:
            self._handle = try_lock(self._scratch / _LOCK)
        except OSError:  # the filesystem has no locks
            self._handle = None
        else:
            if self._handle is None:
                raise OutputError(f"another process is making {self.address}: wait for it, or name another address")
        self._state = _read(self._state_file)
        try:
            self._replaceable()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._uploaded or not any(path.name != _LOCK for path in self._scratch.iterdir()):
            shutil.rmtree(self._scratch, ignore_errors=True)
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def finished(self, depends_on: JsonObject) -> JsonObject | None:
        """Return the record of a finished result whose upload was interrupted; None if it has to be made.

        Args:
            depends_on: what the result depends on, as plain data.
        """
        if self._state.get("depends_on") == json.loads(json.dumps(depends_on)) and (self.folder / RECORD).is_file():
            return _read(self.folder / RECORD)
        if self._state.pop("depends_on", None) is not None:  # the folder will hold another result
            write_json(self._state_file, self._state)
        return None

    def upload(self, depends_on: JsonObject, on_bytes: OnBytes) -> None:
        """Upload the finished result; leaving the context then removes the scratch folder.

        Args:
            depends_on: as for `finished`; if the upload fails, a repeated command uploads what is missing.
            on_bytes: called with the progress.

        Raises:
            OutputError: objects that may not be replaced have appeared under the address, or another run uploads there.
            UploadError: the store fails, or an object has another size than its file.
        """
        known = self._state if "depends_on" in self._state else {}
        self._state = {
            "token": self._state.get("token") or secrets.token_hex(8),
            "uploaded": known.get("uploaded", {}),
            "depends_on": depends_on,
        }
        write_json(self._state_file, self._state)
        try:
            self._upload(on_bytes)
        except (InterruptedRunError, OutputError):
            raise
        except Exception as problem:
            raise UploadError(
                f"{self._store.explained(problem)}; the result is kept in {self.folder}, and the same command continues the upload"
            ) from None
        self._uploaded = True

    def _upload(self, on_bytes: OnBytes) -> None:
        sizes = {
            path.relative_to(self.folder).as_posix(): path.stat().st_size
            for path in sorted(self.folder.rglob("*"))
            if path.is_file()
        }
        there = self._replaceable()
        marker = {"token": self._state["token"], "files": sorted({*sizes, *there})}
        self._store.files.pipe_file(self._store.path(_MARKER), json.dumps(marker).encode())
        uploaded = self._state["uploaded"]
        missing = [name for name in sizes if name not in there or uploaded.get(name) != _identity(there[name])]
        stale = [name for name in _LAST if name in there and name in missing]
        stale += [name for name in there if name not in sizes]
        for name in sorted(stale, key=lambda name: name != "config.json"):  # no reader finds a mixture of two results
            self._store.files.rm_file(self._store.path(name))
        first = [name for name in missing if name not in _LAST]
        move_files(
            first,
            lambda name, callback: self._upload_one(name, sizes[name], callback),
            sum(sizes[name] for name in first),
            on_bytes,
            self._remember,
        )
        self._check_marker()
        for name in _LAST:
            if name in missing:
                self._remember(name, self._upload_one(name, sizes[name]))
        self._store.files.rm_file(self._store.path(_MARKER))

    def _upload_one(self, name: str, nbytes: int, callback: Any = None) -> StoredObject:
        path = self._store.path(name)
        options = {} if callback is None else {"callback": callback}
        self._store.files.put_file(str(self.folder / name), path, **options)
        stored = self._store.info(name)
        if stored.nbytes != nbytes:
            raise UploadError(
                f"{self.address}/{name} has {stored.nbytes:,} bytes after the upload instead of {nbytes:,}"
            )
        return stored

    def _remember(self, name: str, stored: StoredObject) -> None:
        self._state["uploaded"][name] = _identity(stored)
        write_json(self._state_file, self._state)

    def _replaceable(self) -> dict[str, StoredObject]:
        """Return the objects under the address; all of them may be replaced.

        Raises:
            OutputError: they may not.
        """
        there = self._store.list()
        if not there:
            return {}
        if there.pop(_MARKER, None) is None:
            ours, unfinished, own = self._earlier_result(there), False, False
        else:
            marker = self._content(_MARKER)
            ours, unfinished = set(marker.get("files", ())), True
            own = marker.get("token") is not None and marker.get("token") == self._state.get("token")
        if foreign := sorted(there.keys() - ours):
            raise OutputError(
                f"{self.address} exists already and holds objects that gqa-convert did not write or that were changed later "
                f"({some(foreign)}): name a new address, or move them away"
            )
        if unfinished and not own and not self._overwrite:
            raise OutputError(
                f"{self.address} holds the unfinished upload of another run: wait for it, name a new address, or replace it "
                "with --overwrite"
            )
        if not unfinished and not self._overwrite:
            raise OutputError(f"{self.address} exists already: name a new address, or replace it with --overwrite")
        return there

    def _earlier_result(self, there: Mapping[str, StoredObject]) -> set[str]:
        """Return the objects of a complete result that are not newer than its record, which was uploaded last."""
        if RECORD not in there:
            return set()
        written, last = self._content(RECORD).get(WRITTEN), there[RECORD].modified
        if not isinstance(written, dict):
            return set()
        return {RECORD} | {
            name
            for name, entry in written.items()
            if name in there and entry.get("bytes") == there[name].nbytes and there[name].modified <= last
        }

    def _check_marker(self) -> None:
        if self._content(_MARKER).get("token") != self._state["token"]:
            raise OutputError(
                f"another run uploads to {self.address} at the same time: name another address, or repeat the command later"
            )

    def _content(self, name: str) -> JsonObject:
        """Return the JSON object that is stored under a name, or an empty one if there is none."""
        try:
            return parse_object(self._store.files.cat_file(self._store.path(name)), f"{self.address}/{name}")
        except CorruptCheckpointError:
            return {}
        except Exception as problem:
            raise self._store.explained(problem) from None


def scratch_folder(address: str) -> Path:
    """Return where a result is made on the disk before it is uploaded to an address."""
    return cache_folder() / "results" / address_digest(address) / "result"


def working_folder(out: str | Path, *, overwrite: bool) -> tuple[Path, bool]:
    """Return the folder in which a result is made, and whether an earlier result in it may be replaced.

    It is the result's own folder, or the scratch folder of an address.

    Raises:
        GQAConvertError: the address may not be written to; see `StoreResult`.
    """
    address = store_address(out)
    if address is None:
        return local_path(out), overwrite
    with StoreResult(address, overwrite=overwrite) as store:
        return store.folder, True


def check_apart(address: str, source: str | None) -> None:
    """Refuse a result that is the source, lies in it, or contains it.

    Args:
        address: of the result.
        source: the address of the source; None if it is elsewhere.

    Raises:
        OutputError: it does.
    """
    if source is not None and (f"{address}/".startswith(f"{source}/") or f"{source}/".startswith(f"{address}/")):
        raise OutputError(f"{address} and the source {source} are the same or one in the other: name another address")


def _identity(stored: StoredObject) -> list[Any]:
    return [stored.nbytes, stored.version]


def _read(path: Path) -> JsonObject:
    try:
        return parse_object(path.read_bytes(), str(path))
    except (OSError, CorruptCheckpointError):
        return {}
