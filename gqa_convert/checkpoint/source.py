"""Open a checkpoint: its config, the headers of its weight files, and the list of everything else in it. No weight is
read.
"""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gqa_convert.checkpoint import formats
from gqa_convert.checkpoint.headers import LENGTH_BYTES, Header, TensorEntry, header_length, parse_header
from gqa_convert.checkpoint.paths import expanded
from gqa_convert.checkpoint.store import FileStore, FolderStore, is_utf8
from gqa_convert.checkpoint.strict_json import parse_object
from gqa_convert.errors import (
    ConfigError,
    CorruptCheckpointError,
    RemoteHeadersError,
    SourceNotFoundError,
    UnsupportedFormatError,
)

CONFIG = "config.json"
MAX_JSON_BYTES = 200_000_000
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class Shard:
    """One weight file: its name, its size in bytes, its header, and whether it must be spilled before byte ranges can
    be read.
    """

    file: str
    size: int
    header: Header
    spilled: bool = False
    modified_ns: int | None = None
    """When the local file was last written."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose headers have been read and checked."""

    source_id: str
    """As the user named it: a folder or a Hub id."""
    revision: str | None
    """The commit on the Hub, if it came from there."""
    folder: Path | None
    """Where the files are, or None if they are on the Hub and were not downloaded."""
    config: dict[str, Any]
    weights_format: Literal["safetensors", "torch"]
    shards: tuple[Shard, ...]
    index_metadata: dict[str, Any] | None
    """The `metadata` of the index, or None if there is a single weight file."""
    carried: tuple[str, ...]
    """Files that a conversion copies as they are."""
    left_behind: tuple[str, ...]
    """Weight files in other formats and the like, which a conversion must not copy."""
    sizes: dict[str, int]
    """Every file's size in bytes."""

    def tensors(self) -> Iterator[tuple[int, str, TensorEntry]]:
        """Every tensor in file order: its shard's number, its name, its entry."""
        for number, shard in enumerate(self.shards):
            for name, entry in shard.header.tensors.items():
                yield number, name, entry

    @property
    def weight_bytes(self) -> int:
        return sum(entry.nbytes for _, _, entry in self.tensors())


def open_checkpoint(source: str | Path, *, revision: str | None = None, download: bool = False) -> Checkpoint:
    """Open a local folder or a Hub repository.

    Args:
        source: a folder, or a Hub id such as `org/name`. A path that exists wins.
        revision: branch, tag or commit on the Hub.
        download: fetch the whole checkpoint into the Hub's cache, so that `folder` is set. Without it only the config,
            the index
            and the tensor headers of a Hub repository are read, by range requests.

    Raises:
        SourceNotFoundError: there is no such folder or repository, or no checkpoint in it.
        ConfigError: `config.json` is missing or no JSON object.
        CorruptCheckpointError: a weight file or the index is missing, truncated or contradicts itself.
        UnsupportedFormatError: quantised weights, an adapter, a training checkpoint or a foreign format.
    """
    path = _local_path(source)
    if path is not None and path.is_dir():
        if revision is not None:
            raise SourceNotFoundError(
                f"{source} is a local folder, which has no revision {revision!r}: leave --revision out"
            )
        return read_checkpoint(FolderStore(path), expanded(source), None)
    if path is not None:
        raise SourceNotFoundError(f"{source} is a file: name the folder that holds config.json and the weights")
    from gqa_convert.checkpoint.hub import HubStore, open_hub_store

    store, commit = open_hub_store(str(source), revision)
    if download and isinstance(store, HubStore):
        folder = store.download(_survey(store, str(source)).others)
        store, commit = FolderStore(folder), folder.name
    return read_checkpoint(store, str(source), commit)


def open_local(source: str | Path, revision: str | None, check: Callable[[Checkpoint], Any]) -> Checkpoint:
    """A checkpoint as a local folder; one on the Hub is downloaded only once its headers have passed a check.

    Args:
        source: as for `open_checkpoint`.
        revision: branch, tag or commit on the Hub.
        check: called with a checkpoint on the Hub; what it raises stops the download.
    """
    try:
        remote = open_checkpoint(source, revision=revision)
    except RemoteHeadersError:  # `.bin` files, which have no headers to look at before
        return open_checkpoint(source, revision=revision, download=True)
    if remote.folder is not None:
        return remote
    check(remote)
    return open_checkpoint(source, revision=revision, download=True)


def _local_path(source: str | Path) -> Path | None:
    """The path that `source` names, or None if there is nothing."""
    if not is_utf8(str(source)):
        raise SourceNotFoundError(f"the path {source} is no UTF-8, in which results record it: rename the folder")
    try:
        path = Path(source).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError) as problem:  # too long, no permission, no such user, NUL
        raise SourceNotFoundError(f"{source} can't be looked at ({problem}): check the path") from None


@dataclass(frozen=True, slots=True)
class _Survey:
    """What the names of the files, the config and the index tell."""

    config: dict[str, Any]
    chosen: str
    weight_map: dict[str, str] | None
    index_metadata: dict[str, Any] | None
    shard_files: list[str]
    others: tuple[str, ...]
    """Weight files that are not read."""


def _survey(store: FileStore, source_id: str) -> _Survey:
    if CONFIG not in store.files:
        formats.choose_weights(
            store.files, source_id
        )  # an adapter or a foreign format has a better explanation than the next line
        raise ConfigError(f"{source_id} has no config.json: name the folder that save_pretrained wrote")
    config = parse_object(_read_json(store, CONFIG), f"{source_id}/{CONFIG}", ConfigError)
    formats.refuse_quantised_config(config, f"{source_id}/{CONFIG}")
    chosen = formats.choose_weights(store.files, source_id)
    named = config.get("transformers_weights")
    if named is not None and named != chosen:
        raise UnsupportedFormatError(
            f"{source_id}/{CONFIG} names {named!r} as its weights, not {chosen}: save the model anew"
        )
    weight_map: dict[str, str] | None = None
    index_metadata: dict[str, Any] | None = None
    if chosen in (formats.SAFETENSORS_INDEX, formats.TORCH_INDEX):
        weight_map, index_metadata = _read_index(store, chosen, source_id)
        shard_files = sorted(set(weight_map.values()))
    else:
        shard_files = [chosen]
    for file in shard_files:
        if file not in store.files:
            raise CorruptCheckpointError(
                f"{source_id}/{file} is missing, though {chosen} names it: download or copy it again"
            )
    read = {chosen, *shard_files}
    others = tuple(sorted(name for name in store.files if formats.is_weight_file(name) and name not in read))
    return _Survey(config, chosen, weight_map, index_metadata, shard_files, others)


def read_checkpoint(store: FileStore, source_id: str, revision: str | None) -> Checkpoint:
    """Read and check the config and all headers of the checkpoint in `store`; the errors are `open_checkpoint`'s."""
    survey = _survey(store, source_id)
    if store.folder is None:
        with ThreadPoolExecutor(8) as pool:  # what takes time there is the way to the server and back
            shards = list(pool.map(lambda file: read_shard(store, file, source_id), survey.shard_files))
    else:
        shards = [read_shard(store, file, source_id) for file in survey.shard_files]
    _check_census(shards, survey.weight_map, source_id, survey.chosen)
    return Checkpoint(
        source_id=source_id,
        revision=revision,
        folder=store.folder,
        config=survey.config,
        weights_format="torch" if survey.chosen in (formats.TORCH_SINGLE, formats.TORCH_INDEX) else "safetensors",
        shards=tuple(shards),
        index_metadata=survey.index_metadata,
        carried=tuple(name for name in store.files if name != CONFIG and not formats.is_weight_file(name)),
        left_behind=survey.others,
        sizes=dict(store.files),
    )


def _read_json(store: FileStore, name: str) -> bytes:
    if store.files[name] > MAX_JSON_BYTES:
        raise CorruptCheckpointError(f"{name} has {store.files[name]:,} bytes, far too many for what it should hold")
    return store.read(name, 0, store.files[name])


def _read_index(store: FileStore, name: str, source_id: str) -> tuple[dict[str, str], dict[str, Any]]:
    """The index's weight map (tensor -> file) and metadata, every entry checked to be a plain file name."""
    where = f"{source_id}/{name}"
    suffix = ".safetensors" if name == formats.SAFETENSORS_INDEX else ".bin"
    index = parse_object(_read_json(store, name), where)
    weight_map, metadata = index.get("weight_map"), index.get("metadata") or {}
    if not isinstance(weight_map, dict) or not weight_map or not isinstance(metadata, dict):
        raise CorruptCheckpointError(f"{where} has no weight_map: download or copy it again")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not file or file in (".", "..") or "/" in file or "\\" in file or "\0" in file:
            raise CorruptCheckpointError(
                f"{where} sends tensor {tensor!r} to {file!r}, which is no file of this folder: do not trust it"
            )
        if not file.endswith(suffix):
            raise CorruptCheckpointError(
                f"{where} sends tensor {tensor!r} to {file!r}, which is no {suffix} file: download it again"
            )
    # tens of thousands of names: each is kept once, here and in the headers
    return {sys.intern(tensor): sys.intern(file) for tensor, file in weight_map.items()}, metadata


def read_shard(store: FileStore, file: str, source_id: str) -> Shard:
    """One weight file's header, by itself."""
    where, size = f"{source_id}/{file}", store.files[file]
    if size < 1024 and store.read(file, 0, len(_LFS_POINTER)) == _LFS_POINTER:
        raise CorruptCheckpointError(
            f"{where} is only a Git LFS pointer to the weights: fetch them with `git lfs pull`"
        )
    modified_ns = (store.folder / file).stat().st_mtime_ns if store.folder else None
    if file.endswith(".safetensors"):
        length = header_length(store.read(file, 0, LENGTH_BYTES), size, where)
        return Shard(file, size, parse_header(store.read(file, LENGTH_BYTES, length), size, where), False, modified_ns)
    if store.folder is None:
        raise RemoteHeadersError(
            f"{source_id} holds {file} and no safetensors, so that its tensors can't be listed from afar: download it and name the folder"
        )
    from gqa_convert.checkpoint.torch_files import read_torch_header

    header, spilled = read_torch_header(store.folder / file)
    return Shard(file, size, header, spilled, modified_ns)


def _check_census(shards: list[Shard], weight_map: dict[str, str] | None, source_id: str, index_name: str) -> None:
    """Every tensor once, where the index says, none quantised, and none of a model inside a wrapper."""
    homes: dict[str, str] = {}
    for shard in shards:
        for name, entry in shard.header.tensors.items():
            formats.refuse_wrapped_tensor(name, f"{source_id}/{shard.file}")
            formats.refuse_quantised_tensor(name, entry.dtype, f"{source_id}/{shard.file}")
            if name in homes:
                raise CorruptCheckpointError(
                    f"{source_id} holds tensor {name!r} twice, in {homes[name]} and {shard.file}: remove one"
                )
            homes[name] = shard.file
    if weight_map is None or homes == weight_map:
        return
    for name, file in weight_map.items():
        if homes.get(name) != file:
            raise CorruptCheckpointError(
                f"{source_id}/{index_name} promises tensor {name!r} in {file}, which does not hold it: copy both again"
            )
    stray = next(name for name in homes if name not in weight_map)
    raise CorruptCheckpointError(
        f"{source_id}/{homes[stray]} holds tensor {stray!r}, which {index_name} does not name: copy both again"
    )
