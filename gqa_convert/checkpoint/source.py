"""Open a checkpoint: its config, the headers of its weight files, and the list of everything else in it. No weight is read."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gqa_convert.checkpoint import formats
from gqa_convert.checkpoint.headers import LENGTH_BYTES, Header, TensorEntry, header_length, parse_header
from gqa_convert.checkpoint.store import FileStore, FolderStore
from gqa_convert.checkpoint.strict_json import parse_object
from gqa_convert.errors import ConfigError, CorruptCheckpointError, SourceNotFoundError, UnsupportedFormatError

CONFIG = "config.json"
MAX_JSON_BYTES = 200_000_000


@dataclass(frozen=True, slots=True)
class Shard:
    """One weight file: its name, its size in bytes, its header, and whether it must be spilled before byte ranges can be read."""

    file: str
    size: int
    header: Header
    spilled: bool = False


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
        download: fetch the whole checkpoint into the Hub's cache, so that `folder` is set. Without it only the config, the index
            and the tensor headers of a Hub repository are read, by range requests.

    Raises:
        SourceNotFoundError: there is no such folder or repository, or no checkpoint in it.
        ConfigError: `config.json` is missing or no JSON object.
        CorruptCheckpointError: a weight file or the index is missing, truncated or contradicts itself.
        UnsupportedFormatError: quantised weights, an adapter, a training checkpoint or a foreign format.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        if revision is not None:
            raise SourceNotFoundError(f"{source} is a local folder, which has no revision {revision!r}: leave --revision out")
        return read_checkpoint(FolderStore(path), str(source), None)
    if path.exists():
        raise SourceNotFoundError(f"{source} is a file: name the folder that holds config.json and the weights")
    from gqa_convert.checkpoint.hub import open_hub_store

    store, commit = open_hub_store(str(source), revision, download=download)
    return read_checkpoint(store, str(source), commit)


def read_checkpoint(store: FileStore, source_id: str, revision: str | None) -> Checkpoint:
    """Read and check the config and all headers of the checkpoint in `store`; the errors are `open_checkpoint`'s."""
    if CONFIG not in store.files:
        formats.choose_weights(store.files, source_id)  # an adapter or a foreign format has a better explanation than the next line
        raise ConfigError(f"{source_id} has no config.json: name the folder that save_pretrained wrote")
    config = parse_object(_read_json(store, CONFIG), f"{source_id}/{CONFIG}", ConfigError)
    formats.refuse_quantised_config(config, f"{source_id}/{CONFIG}")
    chosen = formats.choose_weights(store.files, source_id)
    weight_map: dict[str, str] | None = None
    index_metadata: dict[str, Any] | None = None
    if chosen in (formats.SAFETENSORS_INDEX, formats.TORCH_INDEX):
        weight_map, index_metadata = _read_index(store, chosen, source_id)
        shard_files = sorted(set(weight_map.values()))
    else:
        shard_files = [chosen]
    shards = []
    for file in shard_files:
        if file not in store.files:
            raise CorruptCheckpointError(f"{source_id}/{file} is missing, though {chosen} names it: download or copy it again")
        shards.append(_read_shard(store, file, source_id))
    _check_census(shards, weight_map, source_id, chosen)
    return Checkpoint(
        source_id=source_id,
        revision=revision,
        folder=store.folder,
        config=config,
        weights_format="torch" if chosen in (formats.TORCH_SINGLE, formats.TORCH_INDEX) else "safetensors",
        shards=tuple(shards),
        index_metadata=index_metadata,
        carried=tuple(name for name in store.files if name != CONFIG and not formats.is_weight_file(name)),
        left_behind=tuple(
            name for name in store.files if formats.is_weight_file(name) and name != chosen and name not in shard_files
        ),
        sizes=dict(store.files),
    )


def _read_json(store: FileStore, name: str) -> bytes:
    if store.files[name] > MAX_JSON_BYTES:
        raise CorruptCheckpointError(f"{name} has {store.files[name]:,} bytes, far too many for what it should hold")
    return store.read(name, 0, store.files[name])


def _read_index(store: FileStore, name: str, source_id: str) -> tuple[dict[str, str], dict[str, Any]]:
    """The index's weight map (tensor -> file) and metadata, every entry checked to be a plain file name."""
    where = f"{source_id}/{name}"
    index = parse_object(_read_json(store, name), where)
    weight_map, metadata = index.get("weight_map"), index.get("metadata") or {}
    if not isinstance(weight_map, dict) or not weight_map or not isinstance(metadata, dict):
        raise CorruptCheckpointError(f"{where} has no weight_map: download or copy it again")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not file or file in (".", "..") or "/" in file or "\\" in file or "\0" in file:
            raise CorruptCheckpointError(f"{where} sends tensor {tensor!r} to {file!r}, which is no file of this folder: do not trust it")
    return weight_map, metadata


def _read_shard(store: FileStore, file: str, source_id: str) -> Shard:
    where, size = f"{source_id}/{file}", store.files[file]
    if file.endswith(".safetensors"):
        length = header_length(store.read(file, 0, LENGTH_BYTES), size, where)
        return Shard(file, size, parse_header(store.read(file, LENGTH_BYTES, length), size, where))
    if store.folder is None:
        raise UnsupportedFormatError(
            f"{source_id} holds {file} and no safetensors, so that its tensors can't be listed from afar: download it and name the folder"
        )
    from gqa_convert.checkpoint.torch_files import read_torch_header

    header, spilled = read_torch_header(store.folder / file)
    return Shard(file, size, header, spilled)


def _check_census(shards: list[Shard], weight_map: dict[str, str] | None, source_id: str, index_name: str) -> None:
    """Every tensor once, where the index says, and none quantised."""
    homes: dict[str, str] = {}
    for shard in shards:
        for name, entry in shard.header.tensors.items():
            formats.refuse_quantised_tensor(name, entry.dtype, f"{source_id}/{shard.file}")
            if name in homes:
                raise CorruptCheckpointError(f"{source_id} holds tensor {name!r} twice, in {homes[name]} and {shard.file}: remove one")
            homes[name] = shard.file
    if weight_map is None or homes == weight_map:
        return
    for name, file in weight_map.items():
        if homes.get(name) != file:
            raise CorruptCheckpointError(f"{source_id}/{index_name} promises tensor {name!r} in {file}, which does not hold it: copy both again")
    stray = next(name for name in homes if name not in weight_map)
    raise CorruptCheckpointError(f"{source_id}/{homes[stray]} holds tensor {stray!r}, which {index_name} does not name: copy both again")
