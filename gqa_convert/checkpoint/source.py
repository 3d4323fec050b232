"""Open a checkpoint: read its config, the headers of its weight files and the list of its other files, but no weight."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from gqa_convert.checkpoint import foreign, formats, quantised
from gqa_convert.checkpoint.files import CheckpointFiles, LocalFiles, is_utf8
from gqa_convert.checkpoint.headers import LENGTH_BYTES, Header, JoinedTensors, TensorEntry, header_length, parse_header
from gqa_convert.checkpoint.index import parse_index
from gqa_convert.checkpoint.item_bytes import ITEM_BYTES
from gqa_convert.checkpoint.paths import expanded
from gqa_convert.checkpoint.strict_json import JsonObject, parse_object
from gqa_convert.errors import (
    ConfigError,
    CorruptCheckpointError,
    RemoteHeadersError,
    SourceNotFoundError,
    UnsupportedFormatError,
)

CONFIG = "config.json"
_MODULES = "modules.json"
MAX_JSON_BYTES = 200_000_000


@dataclass(frozen=True, slots=True)
class Shard:
    """One weight file: its name, its size in bytes and its header.

    `spilled` says that the file must be written out as plain bytes before byte ranges can be read.
    """

    file: str
    size: int
    header: Header
    spilled: bool = False
    modified_ns: int | None = None
    """Modification time of the local file in nanoseconds."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose headers have been read and checked."""

    source_id: str
    """The folder, Hub id or address that the user named."""
    revision: str | None
    """The commit on the Hub, or None for any other checkpoint."""
    folder: Path | None
    """The local folder with the files, or None if they are remote and were not downloaded."""
    config: JsonObject
    weights_format: Literal["safetensors", "torch"]
    shards: tuple[Shard, ...]
    index_metadata: JsonObject | None
    """The `metadata` of the index, or None if there is a single weight file."""
    carried: tuple[str, ...]
    """Sidecar files that a conversion copies unchanged."""
    left_behind: tuple[str, ...]
    """Weights in other formats and training state, which a conversion must not copy."""
    sizes: dict[str, int]
    """Size in bytes of every file."""
    links_out: tuple[str, ...] = ()
    """Links that lead out of the folder, which are not copied."""
    result_dtypes: Mapping[str, str] = field(default_factory=dict)
    """The types of a result's tensors, where a rewritten source holds them in wider ones."""
    rewritten_from: "Checkpoint | None" = None
    """The checkpoint that this one was rewritten from, if it was."""

    @property
    def origin(self) -> "Checkpoint":
        """The checkpoint that the user named."""
        return self.rewritten_from or self

    def tensors(self) -> Iterator[tuple[int, str, TensorEntry]]:
        """Yield every tensor in file order as (shard number, name, entry)."""
        for number, shard in enumerate(self.shards):
            for name, entry in shard.header.tensors.items():
                yield number, name, entry

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """The entry of every tensor by name."""
        return JoinedTensors(shard.header.tensors for shard in self.shards)

    @property
    def weight_bytes(self) -> int:
        """Of the tensors, in the types of a result."""
        total = 0
        for _, name, entry in self.tensors():
            dtype = self.result_dtypes.get(name)
            total += entry.nbytes if dtype is None else entry.elements * ITEM_BYTES[dtype]
        return total


def open_checkpoint(
    source: str | Path,
    *,
    revision: str | None = None,
    download: bool = False,
    quantised: bool = False,
) -> Checkpoint:
    """Open a local folder or a Hub repository.

    Args:
        source: a folder, or a Hub id such as `org/name`. An existing path takes precedence.
        revision: branch, tag or commit on the Hub.
        download: download the whole checkpoint into the Hub's cache, so that `folder` is set. Otherwise only the config, the index and the tensor headers of a remote checkpoint are read, through range
            requests.
        quantised: accept weights that are quantised by one of `quantised.RESTORED`.

    Raises:
        SourceNotFoundError: there is no such folder or repository, or it holds no checkpoint.
        ConfigError: `config.json` is missing or no JSON object.
        CorruptCheckpointError: a weight file or the index is missing, truncated or contradicts itself.
        UnsupportedFormatError: quantised weights, an adapter, a training checkpoint, a GGUF file or another foreign format.
    """
    path = _local_path(source)
    if path is not None and path.is_dir():
        if revision is not None:
            raise SourceNotFoundError(
                f"{source} is a local folder, which has no revision {revision!r}: omit --revision"
            )
        return read_checkpoint(LocalFiles(path), expanded(source), None, quantised=quantised)
    if str(source).endswith(".gguf"):
        raise UnsupportedFormatError(
            f"{source} is a GGUF file: convert the Hugging Face checkpoint that it was made from"
        )
    if path is None and "://" in str(source):
        raise SourceNotFoundError(
            f"{source} is an address, and checkpoints are read from folders and the Hub: copy it to a folder with the "
            "store's own client, or mount it"
        )
    if path is not None:
        raise SourceNotFoundError(f"{source} is a file: name the folder that holds config.json and the weights")
    from gqa_convert.checkpoint.hub import HubFiles, open_hub_files

    files, commit = open_hub_files(str(source), revision)
    if download and isinstance(files, HubFiles):
        folder = files.download(_survey(files, str(source), quantised).others)
        files, commit = LocalFiles(folder), folder.name
    return read_checkpoint(files, str(source), commit, quantised=quantised)


def open_local(
    source: str | Path,
    revision: str | None,
    check: Callable[[Checkpoint], Any],
) -> Checkpoint:
    """Open a checkpoint as a local folder, and download a remote one only after its headers have passed a check.

    Args:
        source: as for `open_checkpoint`.
        revision: branch, tag or commit on the Hub.
        check: called with a remote checkpoint before the download; an exception prevents the download.
    """
    opened = partial(open_checkpoint, source, revision=revision)
    try:
        remote = opened()
    except RemoteHeadersError:  # `.bin` files have no headers that could be read first
        return opened(download=True)
    if remote.folder is not None:
        return remote
    check(remote)
    return opened(download=True)


def open_headers(source: str | Path, revision: str | None) -> Checkpoint:
    """Open a checkpoint whose weights may be quantised; download it only if its headers can't be read otherwise."""
    try:
        return open_checkpoint(source, revision=revision, quantised=True)
    except RemoteHeadersError:  # `.bin` files have no headers that could be read first
        return open_checkpoint(source, revision=revision, quantised=True, download=True)


def download_checkpoint(remote: Checkpoint, source: str | Path, revision: str | None) -> Checkpoint:
    """Download a checkpoint whose headers `open_headers` has read.

    Raises:
        CorruptCheckpointError: it has other headers now.
    """
    local = open_checkpoint(source, revision=revision, quantised=True, download=True)
    described = [[(shard.file, shard.header) for shard in each.shards] for each in (remote, local)]
    if described[0] != described[1] or remote.config != local.config:
        raise CorruptCheckpointError(f"{source} changed on the Hub while it was downloaded: try again")
    return local


def _local_path(source: str | Path) -> Path | None:
    """Return the path that `source` names, or None if it does not exist."""
    if not is_utf8(str(source)):
        raise SourceNotFoundError(f"the path {source} is not UTF-8, so that records cannot hold it: rename the folder")
    try:
        path = Path(source).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError) as problem:  # too long, no permission, no such user, NUL byte
        raise SourceNotFoundError(f"{source} is not a usable path ({problem}): check it") from None


@dataclass(frozen=True, slots=True)
class _Survey:
    """What the file names, the config and the index of a checkpoint say."""

    config: JsonObject
    chosen: str
    """The weight file or index that transformers would load."""
    listed: dict[str, list[str]] | None
    """The names of the tensors by file, or None if there is no index."""
    index_metadata: JsonObject | None
    shard_files: list[str]
    others: tuple[str, ...]
    """Weight files that are not read."""


def _survey(files: CheckpointFiles, source_id: str, quantised_too: bool) -> _Survey:
    has_weights = any(name in files.sizes for name in formats.PREFERENCE)
    foreign.refuse_adapter(files, source_id, model=has_weights)
    if CONFIG not in files.sizes:
        _choose_weights(files, source_id)  # raises a more helpful error for adapters and foreign formats
        raise ConfigError(f"{source_id} has no config.json: name the folder that save_pretrained wrote")
    config = parse_object(_read_json(files, CONFIG, source_id), f"{source_id}/{CONFIG}", ConfigError)
    if not quantised_too or quantised.quantisation_method(config) not in quantised.RESTORED:
        quantised.refuse_quantised_config(config, source_id, f"{source_id}/{CONFIG}")
    chosen = _choose_weights(files, source_id)
    named = config.get("transformers_weights")
    if named is not None and named != chosen:
        raise UnsupportedFormatError(
            f"{source_id}/{CONFIG} names {named!r} as its weights instead of {chosen}: save the model again with save_pretrained"
        )
    listed: dict[str, list[str]] | None = None
    index_metadata: JsonObject | None = None
    if chosen in (formats.SAFETENSORS_INDEX, formats.TORCH_INDEX):
        listed, index_metadata = _read_index(files, chosen, source_id)
        shard_files = sorted(listed)
        _check_shards(files, shard_files, source_id, chosen)
    else:
        shard_files = [chosen]
    read = {chosen, *shard_files}
    kept = _module_folders(files)
    unread = [name for name in files.sizes if formats.is_weight_file(name) and name not in read]
    others = sorted(name for name in unread if name.rpartition("/")[0] not in kept)
    return _Survey(config, chosen, listed, index_metadata, shard_files, tuple(others))


def _module_folders(files: CheckpointFiles) -> set[str]:
    """The subfolders of further modules that sentence-transformers runs after the model, each with weights of its own."""
    if _MODULES not in files.sizes:
        return set()
    try:
        modules = json.loads(files.read(_MODULES, 0, files.sizes[_MODULES]))
        return {module["path"] for module in modules if module["path"]}
    except (ValueError, TypeError, KeyError):  # a file of this name of another program's
        return set()


def _choose_weights(files: CheckpointFiles, source_id: str) -> str:
    """The weight file or index that transformers would load; a folder without one may be an unfinished download."""
    try:
        return formats.choose_weights(files.sizes, source_id)
    except SourceNotFoundError:
        if unfinished := foreign.unfinished_download(files, source_id):
            raise CorruptCheckpointError(f"{source_id} holds no weights yet, because{unfinished}") from None
        raise


def _check_shards(files: CheckpointFiles, shard_files: list[str], source_id: str, index: str) -> None:
    """Check that every file that an index names is there."""
    missing = [file for file in shard_files if file not in files.sizes]
    if not missing:
        return
    unfinished = foreign.unfinished_download(files, source_id)
    others = f" (and {len(missing) - 1} more of its {len(shard_files)} files)" if len(missing) > 1 else ""
    reason = f", because{unfinished}" if unfinished else ": download or copy it again"
    raise CorruptCheckpointError(f"{source_id}/{missing[0]} is missing, although {index} names it{others}{reason}")


def read_checkpoint(
    files: CheckpointFiles, source_id: str, revision: str | None, *, quantised: bool = False
) -> Checkpoint:
    """Read and check the config and all headers of the checkpoint in `files`; raises as `open_checkpoint` does."""
    survey = _survey(files, source_id, quantised)

    def read(file: str) -> Shard:
        return read_shard(files, file, source_id, () if survey.listed is None else survey.listed[file])

    if files.folder is None:
        with ThreadPoolExecutor(8) as pool:  # network latency dominates
            shards = list(pool.map(read, survey.shard_files))
    else:
        shards = [read(file) for file in survey.shard_files]
    _check_tensor_list(shards, survey, source_id)
    not_carried = {CONFIG, survey.chosen, *survey.shard_files, *survey.others}
    carried = tuple(name for name in files.sizes if name not in not_carried)
    if files.folder is not None:
        foreign.refuse_pointers(files, carried, source_id)
    return Checkpoint(
        source_id=source_id,
        revision=revision,
        folder=files.folder,
        config=survey.config,
        weights_format="torch" if survey.chosen in (formats.TORCH_SINGLE, formats.TORCH_INDEX) else "safetensors",
        shards=tuple(shards),
        index_metadata=survey.index_metadata,
        carried=carried,
        left_behind=survey.others,
        sizes=dict(files.sizes),
        links_out=files.links_out,
    )


def _read_json(files: CheckpointFiles, name: str, source_id: str) -> bytes:
    foreign.refuse_pointer(files, name, source_id)
    if files.sizes[name] > MAX_JSON_BYTES:
        raise CorruptCheckpointError(
            f"{name} has {files.sizes[name]:,} bytes, over the limit of {MAX_JSON_BYTES:,} for a JSON file: download or copy it again"
        )
    return files.read(name, 0, files.sizes[name])


def _read_index(files: CheckpointFiles, name: str, source_id: str) -> tuple[dict[str, list[str]], JsonObject]:
    """Return the names of the tensors by file, and the index's metadata, after checking that every entry is a file name."""
    where = f"{source_id}/{name}"
    suffix = ".safetensors" if name == formats.SAFETENSORS_INDEX else ".bin"
    index = parse_index(_read_json(files, name, source_id), where)
    weight_map, metadata = index.get("weight_map"), index.get("metadata") or {}
    if not isinstance(weight_map, dict) or not weight_map or not isinstance(metadata, dict):
        raise CorruptCheckpointError(f"{where} has no weight_map: download or copy it again")
    listed: dict[str, list[str]] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not file or file in (".", "..") or "/" in file or "\\" in file or "\0" in file:
            raise CorruptCheckpointError(
                f"{where} maps tensor {tensor!r} to {file!r}, which is not a file name in this folder: do not trust the checkpoint"
            )
        if not file.endswith(suffix):
            raise CorruptCheckpointError(
                f"{where} maps tensor {tensor!r} to {file!r}, which is not a {suffix} file: download the index again"
            )
        listed.setdefault(file, []).append(tensor)
    return listed, metadata


def read_shard(files: CheckpointFiles, file: str, source_id: str, names: Iterable[str] = ()) -> Shard:
    """Read and check the header of one weight file, which refers to the objects in `names`."""
    where, size = f"{source_id}/{file}", files.sizes[file]
    foreign.refuse_pointer(files, file, source_id)
    modified_ns = (files.folder / file).stat().st_mtime_ns if files.folder else None
    if file.endswith(".safetensors"):
        length = header_length(files.read(file, 0, LENGTH_BYTES), size, where)
        header = parse_header(files.read(file, LENGTH_BYTES, length), size, where, names)
        return Shard(file, size, header, False, modified_ns)
    if files.folder is None:
        raise RemoteHeadersError(
            f"{source_id} holds {file} and no safetensors, so that its tensors cannot be listed remotely: download it and name the folder"
        )
    from gqa_convert.checkpoint.torch_files import read_torch_header

    header, spilled = read_torch_header(files.folder / file)
    return Shard(file, size, header, spilled, modified_ns)


def _check_tensor_list(shards: list[Shard], survey: _Survey, source_id: str) -> None:
    """Check that every tensor occurs once, in the file that the index names, and is not wrapped; nor quantised, unless the
    config says so.
    """
    listed, index_name = survey.listed, survey.chosen
    described = quantised.quantisation_method(survey.config) is not None
    for shard in shards:
        for name, entry in shard.header.tensors.items():
            formats.refuse_wrapped_tensor(name, f"{source_id}/{shard.file}")
            if not described:
                quantised.refuse_quantised_tensor(name, entry.dtype, f"{source_id}/{shard.file}")
    if listed is not None and all(shard.header.tensors.keys() == set(listed[shard.file]) for shard in shards):
        return
    file_of: dict[str, str] = {}
    for shard in shards:
        for name in shard.header.tensors:
            if name in file_of:
                raise CorruptCheckpointError(
                    f"{source_id} holds tensor {name!r} twice, in {file_of[name]} and {shard.file}: remove one"
                )
            file_of[name] = shard.file
    if listed is None:
        return
    weight_map = {name: file for file, names in listed.items() for name in names}
    for name, file in weight_map.items():
        if file_of.get(name) != file:
            raise CorruptCheckpointError(
                f"{source_id}/{index_name} lists tensor {name!r} in {file}, which does not hold it: download or copy both again"
            )
    stray = next(name for name in file_of if name not in weight_map)
    raise CorruptCheckpointError(
        f"{source_id}/{file_of[stray]} holds tensor {stray!r}, which {index_name} does not list: download or copy both again"
    )
