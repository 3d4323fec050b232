"""Open a checkpoint: read its config, the headers of its weight files and the list of its other
files, but no weight.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from gqa_convert.errors import ConfigError, CorruptCheckpointError, SourceNotFoundError
from gqa_convert.runtime.json_objects import JsonObject, parse_object
from gqa_convert.runtime.messages import some
from gqa_convert.runtime.paths import expanded

from . import formats
from .dtypes import TORCH
from .files import CheckpointFiles, HubFiles, LocalFiles, open_hub_files
from .headers import Entries, TensorEntry

CONFIG = "config.json"
_KINDS = (
    (dict, "an object", ("attn_config", "auto_map", "rope_parameters", "rope_scaling")),
    (list, "a list", ("architectures",)),
    (int, "a whole number", ("sliding_window",)),
)
"""What the values of some keys of a config are, where they are not null."""
_LFS_POINTER = b"version https://git-lfs"
_POINTER_BYTES = 1024
"""Git LFS pointers are shorter than this."""


@dataclass(frozen=True)
class Shard:
    """One weight file: its name, its size in bytes, and its tensors in the order of their bytes."""

    file: str
    size: int
    tensors: Entries
    metadata: dict[str, str]
    modified_ns: int | None = None
    """Modification time of the local file in nanoseconds."""


@dataclass(frozen=True)
class Recipe:
    """How a tensor comes from tensors of the checkpoint that the user named."""

    sources: tuple[str, ...]
    """Their names."""
    compute: Callable[..., Any] | None
    """Makes an array from its numpy type and theirs; None if it has the bytes of the one source."""


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
    files: CheckpointFiles
    """All of its files."""
    result_dtypes: Mapping[str, str] = field(default_factory=dict)
    """The types of a result's tensors, where a rewritten source holds them in wider ones."""
    rewritten_from: "Checkpoint | None" = None
    """The checkpoint that the user named, where this is another form of it."""
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    """How the tensors come from that checkpoint's, until they are written."""
    tokenizer_defaults: Mapping[str, str] = field(default_factory=dict)
    """Values of tokenizer_config.json that the source's tokenizer class has by default, and that of
    this form has not.
    """
    rewriting_notes: tuple[str, ...] = ()
    """Sentences on what is rewritten, and how it differs."""

    @property
    def sizes(self) -> dict[str, int]:
        """Size in bytes of every file."""
        return self.files.sizes

    @property
    def local_folder(self) -> Path:
        """The folder of a checkpoint whose files are known to be local."""
        assert self.folder is not None
        return self.folder

    @property
    def origin(self) -> "Checkpoint":
        """The checkpoint that the user named."""
        return self.rewritten_from or self

    @property
    def stored(self) -> "Checkpoint":
        """The checkpoint whose files hold the numbers."""
        return self.origin if self.recipes else self

    @property
    def notes(self) -> list[str]:
        """Sentences on what the user may not expect of the files."""
        notes = [*self.rewriting_notes]
        links = self.files.links_out
        if links:
            notes.append(
                "links to folders and links that lead out of the folder are not copied: "
                f"{some(links)}"
            )
        if self.files.unreachable is not None:
            notes.append(
                f"the Hub was not asked for the newest commit of {self.source_id} "
                f"({self.files.unreachable}): the files are those of commit "
                f"{self.revision} in its cache"
            )
        return notes

    def tensors(self) -> Iterator[tuple[int, str, TensorEntry]]:
        """Yield every tensor in file order as (shard number, name, entry)."""
        for number, shard in enumerate(self.shards):
            for name, entry in shard.tensors.items():
                yield number, name, entry

    @cached_property
    def entries(self) -> Entries:
        """The entry of every tensor by name."""
        return {name: entry for _, name, entry in self.tensors()}

    @property
    def weight_bytes(self) -> int:
        """Of the tensors, in the types of a result."""
        return sum(
            TensorEntry(self.result_dtypes.get(name, entry.dtype), entry.shape).nbytes
            for name, entry in self.entries.items()
        )


def open_checkpoint(source: str | Path, *, revision: str | None = None) -> Checkpoint:
    """Open a local folder or a Hub repository.

    Of a remote checkpoint only the config, the index and the tensor headers are read;
    `.bin` files have no headers that could be read first, and the whole checkpoint is
    downloaded.

    Args:
        source: a folder, or a Hub id such as `org/name`. An existing path takes precedence.
        revision: branch, tag or commit on the Hub.

    Raises:
        SourceNotFoundError: there is no such folder or repository, or it holds no checkpoint.
        ConfigError: `config.json` is missing or no JSON object.
        CorruptCheckpointError: a weight file or the index is missing, truncated or contradicts
            itself.
        UnsupportedFormatError: quantised weights, an adapter, a training checkpoint, a GGUF file or
            another foreign format.
    """
    # Path's own methods raise an error for a name that is too long
    name = expanded(source)
    if os.path.isdir(name):  # noqa: PTH112
        if revision is not None:
            raise SourceNotFoundError(
                f"{source} is a local folder, which has no revision {revision!r}: omit --revision"
            )
        return read_checkpoint(LocalFiles(Path(name), name))
    if os.path.exists(name):  # noqa: PTH110
        raise SourceNotFoundError(
            f"{source} is a file: name the folder that holds config.json and the weights"
        )
    return read_checkpoint(open_hub_files(str(source), revision))


def open_local(
    source: str | Path,
    revision: str | None = None,
    check: Callable[[Checkpoint], Any] | None = None,
) -> Checkpoint:
    """Open a checkpoint as a local folder. A remote one is downloaded into the Hub's cache at the
    commit whose headers were read.

    Args:
        source: as for `open_checkpoint`, and what is raised.
        revision: branch, tag or commit on the Hub.
        check: called with a remote checkpoint before the download; an exception prevents the
            download.
    """
    opened = open_checkpoint(source, revision=revision)
    if isinstance(opened.files, LocalFiles):
        return opened
    if check:
        check(opened)
    return read_checkpoint(opened.files.download(opened.left_behind))


def read_checkpoint(files: CheckpointFiles) -> Checkpoint:
    """Read and check the config and all headers of the checkpoint in `files`; raises as
    `open_checkpoint` does.
    """
    if isinstance(files, LocalFiles):
        _refuse_pointers(files)
    # the files of the weights, which say more about a folder that is no checkpoint than the config
    chosen = formats.choose_weights(files.sizes, files.name)
    config = _read_config(files)
    # an index, or one file
    weight_map, metadata, names = None, None, [chosen]
    if chosen.endswith(".json"):
        weight_map, metadata = _read_index(files, chosen)
        names = sorted(set(weight_map.values()))
    # other weights must not lie beside converted ones
    read = {CONFIG, chosen, *names}
    others = [name for name in files.sizes if name not in read]
    left_behind = tuple(sorted(filter(formats.is_weight_file, others)))
    is_torch = names[0].endswith(".bin")
    if is_torch and isinstance(files, HubFiles):  # which have no headers
        return read_checkpoint(files.download(left_behind))
    readers = 1 if is_torch else 8  # of remote files, latency dominates
    with ThreadPoolExecutor(readers) as pool:
        shards = tuple(pool.map(partial(_read_shard, files), names))
    _check_tensors(files.name, shards, weight_map)
    return Checkpoint(
        source_id=files.name,
        revision=files.commit,
        folder=files.folder,
        config=config,
        weights_format="torch" if is_torch else "safetensors",
        shards=shards,
        index_metadata=metadata,
        carried=tuple(name for name in others if name not in left_behind),
        left_behind=left_behind,
        files=files,
    )


def _refuse_pointers(files: LocalFiles) -> None:
    """Raise CorruptCheckpointError for what a clone without Git LFS leaves in place of a file."""
    for name, size in files.sizes.items():
        is_small = "/" not in name and size < _POINTER_BYTES
        if is_small and files.read(name).startswith(_LFS_POINTER):
            raise CorruptCheckpointError(
                f"{files.name}/{name} is only a Git LFS pointer to its content: "
                "fetch the files with `git lfs pull`, or download the repository with `hf download`"
            )


def _read_config(files: CheckpointFiles) -> JsonObject:
    """Read config.json, and check the keys that this package reads whatever the model type."""
    where = f"{files.name}/{CONFIG}"
    if CONFIG not in files.sizes:
        raise ConfigError(
            f"{files.name} has no config.json: name the folder that save_pretrained wrote"
        )
    config = parse_object(files.read(CONFIG), where, ConfigError)
    # a value of another kind would fail later, in the middle of a run
    for kind, words, keys in _KINDS:
        for key in keys:
            if not isinstance(config.get(key), kind | None):
                raise ConfigError(
                    f"{where} has {key!r}: {config[key]!r}, expected {words}: correct it"
                )
    # loading the result in a type of one's own would hide it
    for key in ("dtype", "torch_dtype"):
        stated = config.get(key)
        if stated is not None and f"torch.{stated}" not in TORCH:
            raise ConfigError(
                f"{where} has {key!r}: {stated!r}, which from_pretrained does not know: "
                "write the type of the weights there, such as bfloat16"
            )
    formats.refuse_quantised_config(config, files.name)
    return config


def _read_index(files: CheckpointFiles, name: str) -> tuple[dict[str, str], JsonObject]:
    """Return the file of each tensor, which is checked to be in the folder, and the index's
    metadata.
    """
    where = f"{files.name}/{name}"
    suffix = ".bin" if name == formats.TORCH_INDEX else ".safetensors"
    index = parse_object(files.read(name), where)
    weight_map = index.get("weight_map")
    metadata = index.get("metadata") or {}
    if not isinstance(weight_map, dict) or not weight_map or not isinstance(metadata, dict):
        raise CorruptCheckpointError(f"{where} has no weight_map: download or copy it again")
    # an index must not lead out of the folder
    for tensor, file in weight_map.items():
        if "/" in str(file) or not str(file).endswith(suffix):
            raise CorruptCheckpointError(
                f"{where} maps tensor {tensor!r} to {file!r}, "
                f"which is not a {suffix} file in this folder: download the index again"
            )
        if file not in files.sizes:
            raise CorruptCheckpointError(
                f"{files.name}/{file} is missing, although {name} names it: "
                "finish the download (`hf download` resumes), or copy it again"
            )
    return weight_map, metadata


def _read_shard(files: CheckpointFiles, file: str) -> Shard:
    """Read and check the header of one weight file."""
    modified_ns = (files.folder / file).stat().st_mtime_ns if files.folder else None
    tensors, metadata = files.read_header(file)
    return Shard(file, files.sizes[file], tensors, metadata, modified_ns)


def _check_tensors(
    source: str, shards: tuple[Shard, ...], weight_map: dict[str, str] | None
) -> None:
    """Check that every tensor lies in the file that the index names, and in no other, and is
    neither wrapped nor quantised.
    """
    found = set()
    for shard in shards:
        for name, entry in shard.tensors.items():
            formats.refuse_tensor(name, entry.dtype, f"{source}/{shard.file}")
            found.add((name, shard.file))
    # transformers would leave out, or never find, what only one of them has
    apart = found ^ weight_map.items() if weight_map else None
    if apart:
        name, file = min(apart)
        raise CorruptCheckpointError(
            f"{source}: the index and the weight files disagree on tensor {name!r} in {file}: "
            "download or copy all of them again"
        )
