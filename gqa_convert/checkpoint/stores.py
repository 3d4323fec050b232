"""Checkpoints in object stores, such as `s3://bucket/model`: headers by ranges, or a fetch into a cache folder.

fsspec speaks to the stores, through a package for each of them (s3fs, gcsfs, adlfs) that the user installs.
"""

import contextlib
import hashlib
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.atomic_files import sync
from gqa_convert.checkpoint.locks import wait_for_lock
from gqa_convert.checkpoint.paths import cache_folder
from gqa_convert.checkpoint.resource_errors import is_disk_full
from gqa_convert.checkpoint.transfers import OnBytes, move_files
from gqa_convert.errors import (
    CorruptCheckpointError,
    GQAConvertError,
    MissingExtraError,
    NoSpaceError,
    SourceNotFoundError,
    StoreError,
)

_ADDRESS = re.compile(r"(?P<protocol>[A-Za-z][A-Za-z0-9+.-]+):/{1,2}(?P<path>[^/].*)")
"""An address, also after `pathlib` has made one slash of its two."""

_NO_STORES = {"data", "file", "http", "https", "local"}
"""Protocols of fsspec that hold no prefixes of objects with versions."""

_EXTRAS = {"s3fs": "'gqa-convert[s3]'"}
"""What to install for a package, where it is not the package itself."""

_VERSION_KEYS = (
    "ETag",
    "etag",
    "md5Hash",
    "content_md5",
    "blob_id",
    "mtime",
    "LastModified",
    "last_modified",
    "created",
)
"""Where file systems of fsspec say by what a changed object is recognised, the best first."""

_TIME_KEYS = ("LastModified", "last_modified", "updated", "mtime", "created")

_NO_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "DefaultCredentialsError",
}
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")
_PARTIAL = ".part"


def store_address(given: str | os.PathLike[str]) -> str | None:
    """Return the address of an object store that an argument is, without a slash at its end; None for all others.

    An existing path takes precedence.
    """
    match = _ADDRESS.fullmatch(str(given))
    if match is None or match["protocol"].lower() in _NO_STORES or os.path.lexists(given):
        return None
    return f"{match['protocol'].lower()}://{match['path'].rstrip('/')}"


def address_digest(address: str) -> str:
    """Return the name of the cache folder of an address."""
    return hashlib.sha256(address.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class StoredObject:
    """The size of an object, and by what a change of it is recognised: its ETag, or what else the store states."""

    nbytes: int
    version: str
    modified: float = field(default=math.nan, compare=False)
    """When it was written, in seconds of the store's clock; NaN if the store does not say so."""


class Store:
    """The objects under an address.

    Raises:
        MissingExtraError: the package for this kind of store is not installed.
        StoreError: there is no such kind of store, or its client refuses the address.
    """

    def __init__(self, address: str) -> None:
        import fsspec
        from fsspec.registry import known_implementations

        self.address = address
        protocol = address.partition("://")[0]
        if protocol not in fsspec.available_protocols():
            raise StoreError(f"{address} is in no store that fsspec knows: write it like s3://bucket/model")
        try:
            # with a cache of listings, objects that have changed would not be noticed
            self.files, path = fsspec.url_to_fs(address, use_listings_cache=False)
        except ImportError:
            package = known_implementations[protocol]["class"].partition(".")[0]
            raise MissingExtraError(
                f"{address} needs the package {package}, which is not installed: pip install {_EXTRAS.get(package, package)}"
            ) from None
        except Exception as problem:
            raise self.explained(problem) from None
        self._path = str(path).rstrip("/")

    def path(self, name: str) -> str:
        """Return the path of an object in fsspec's file system."""
        return f"{self._path}/{name}"

    def list(self) -> dict[str, StoredObject]:
        """Return the objects under the address by their names relative to it, sorted.

        Raises:
            StoreError: there is no such bucket, the store cannot be reached, or it refuses access.
        """
        try:
            found = self.files.find(self._path, detail=True)
        except Exception as problem:
            raise self.explained(problem) from None
        return {
            name: _stored(entry)
            for path, entry in sorted(found.items())
            if entry["type"] == "file" and (name := str(path)[len(self._path) + 1 :]) and not name.endswith("/")
        }

    def info(self, name: str) -> StoredObject:
        """Return what the store says of one object."""
        return _stored(self.files.info(self.path(name)))

    def explained(self, problem: Exception) -> GQAConvertError:
        """Turn an error of fsspec or of a store's client into one line."""
        if isinstance(problem, GQAConvertError):
            return problem
        if isinstance(problem, OSError) and is_disk_full(problem):
            return NoSpaceError(
                f"the disk or quota of {cache_folder()} is full: free some space, or set XDG_CACHE_HOME"
            )
        detail = " ".join(str(problem).split())[:200] or type(problem).__name__
        if _NO_CREDENTIALS & {kind.__name__ for kind in type(problem).__mro__}:
            advice = "set those that the store's client reads, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            return StoreError(f"there are no credentials for {self.address} ({detail}): {advice}")
        if isinstance(problem, PermissionError):
            return StoreError(
                f"the store refuses access to {self.address} ({detail}): check the credentials and their rights"
            )
        if isinstance(problem, FileNotFoundError):
            return StoreError(f"{self.address} does not exist ({detail}): check the address")
        return StoreError(
            f"the store did not serve {self.address} ({detail}): check the address, the network and the client's settings"
        )


def _stored(entry: dict[str, Any]) -> StoredObject:
    version, modified = _first(entry, _VERSION_KEYS), _first(entry, _TIME_KEYS)
    written = modified if isinstance(modified, (int, float)) else math.nan
    return StoredObject(int(entry["size"]), str(version or "").strip('"'), written)


def _first(entry: dict[str, Any], keys: Sequence[str]) -> Any:
    """Return the first of some values that is there; of a time, the seconds."""
    found: Any = next((entry[key] for key in keys if entry.get(key) is not None), None)
    if type(found) is str and _TIME.match(found):
        found = datetime.fromisoformat(found)
    return found.timestamp() if hasattr(found, "timestamp") else found


class StoreFiles:
    """The files of a checkpoint in an object store, read by range requests. It implements `files.CheckpointFiles`.

    Args:
        address: of the checkpoint, from `store_address`.

    Raises:
        SourceNotFoundError: there is nothing under the address.
        GQAConvertError: as of `Store`.
    """

    def __init__(self, address: str) -> None:
        self._store = Store(address)
        self._listed = self._store.list()
        self._objects = {name: stored for name, stored in self._listed.items() if _is_visible(name)}
        if not self._objects:
            raise SourceNotFoundError(
                f"there are no objects under {address}/: name the prefix that holds config.json and the weights"
            )
        self.sizes = {name: stored.nbytes for name, stored in self._objects.items()}
        self.folder: Path | None = None
        self.links_out: tuple[str, ...] = ()

    @property
    def versions(self) -> dict[str, str]:
        """The ETag of every file, or what else its store states."""
        return {name: stored.version for name, stored in self._objects.items()}

    def read(self, name: str, start: int, length: int) -> bytes:
        end = min(start + length, self.sizes[name])
        if end <= start:
            return b""
        try:
            return bytes(self._store.files.cat_file(self._store.path(name), start=start, end=end))
        except Exception as problem:
            raise self._store.explained(problem) from None

    def check_unchanged(self) -> None:
        """Raise CorruptCheckpointError if an object is new, gone or changed since the files were listed."""
        listed = self._store.list()
        if listed != self._listed:
            changed = next(name for name in {**self._listed, **listed} if listed.get(name) != self._listed.get(name))
            raise self._changed(changed)

    def _changed(self, name: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self._store.address}/{name} has changed while the checkpoint was read: wait until it is complete, and try again"
        )

    def fetch(self, leave_out: Iterable[str], on_bytes: OnBytes) -> Path:
        """Fetch the files into the cache, except those that it has already.

        Args:
            leave_out: names of files that are not needed.
            on_bytes: called with the progress.

        Returns:
            A folder with the files, which are links into the cache. A source in another state has another folder.

        Raises:
            CorruptCheckpointError: the source changes meanwhile.
            NoSpaceError: the disk lacks the room.
            StoreError: the store fails.
        """
        folder = cache_folder() / "stores" / address_digest(self._store.address)
        objects = folder / "objects"
        objects.mkdir(parents=True, exist_ok=True)
        unwanted = set(leave_out)
        kept = {name: objects / self._key(name) for name in self.sizes if name not in unwanted}
        with wait_for_lock(folder / ".lock") as held:
            for partial in objects.glob(f"*{_PARTIAL}") if held else ():  # of a process that was killed
                partial.unlink(missing_ok=True)
            missing = [name for name, path in kept.items() if not path.exists()]
            nbytes = sum(self.sizes[name] for name in missing)
            self._check_room(folder, nbytes)
            try:
                move_files(
                    missing, lambda name, callback: self._fetch_one(name, kept[name], callback), nbytes, on_bytes
                )
            except Exception as problem:
                raise self._store.explained(problem) from None
            self.check_unchanged()
            return self._linked(folder, kept)

    def _key(self, name: str) -> str:
        stored = self._objects[name]
        return hashlib.sha256(f"{name}\0{stored.nbytes}\0{stored.version}".encode()).hexdigest()[:32]

    def _check_room(self, folder: Path, nbytes: int) -> None:
        free = shutil.disk_usage(folder).free
        if nbytes > free:
            raise NoSpaceError(
                f"fetching {self._store.address} needs {nbytes:,} bytes, and the disk of {folder} has {free:,} free: make "
                "room, or set XDG_CACHE_HOME to a folder on another disk"
            )

    def _fetch_one(self, name: str, path: Path, callback: Any) -> None:
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_PARTIAL}")
        try:
            self._store.files.get_file(self._store.path(name), str(partial), callback=callback)
            # the object may have been replaced after the listing, by which the file is named
            if partial.stat().st_size != self.sizes[name] or self._store.info(name) != self._objects[name]:
                raise self._changed(name)
            sync(partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def _linked(self, folder: Path, kept: dict[str, Path]) -> Path:
        """Return a folder in which the fetched files have their own names."""
        state = hashlib.sha256("\0".join(f"{name}\0{path.name}" for name, path in kept.items()).encode())
        named = folder / "checkpoints" / state.hexdigest()[:16]
        for name, path in kept.items():
            link = named / name
            link.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                link.symlink_to(os.path.relpath(path, link.parent))
        return named


def _is_visible(name: str) -> bool:
    """Whether a name is that of a checkpoint's file: not hidden, not a Python cache, and within the folder."""
    parts = name.split("/")
    return all(part and not part.startswith(".") for part in parts) and "__pycache__" not in parts


def fetch_store(address: str, on_bytes: OnBytes, leave_out: Sequence[str] = ()) -> Path:
    """Fetch everything under an address into the cache, and return the folder.

    Raises:
        GQAConvertError: as of `StoreFiles`.
    """
    return StoreFiles(address).fetch(leave_out, on_bytes)
