"""GGUF files as sources: which file a user means, and what its header says."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from gqa_convert.checkpoint.paths import local_path
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.errors import CorruptCheckpointError, MissingExtraError, SourceNotFoundError, UnsupportedFormatError

SUFFIX: Final = ".gguf"
_MAGIC = b"GGUF"
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_NO_MODELS = ("mmproj", "imatrix")
"""What the names of GGUF files with an image projector or calibration statistics begin with."""
_HUB_FILE = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)/(?P<file>.+\.gguf)")
_FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_NAMED = 4
"""Files that a message names; it counts the rest."""


class GGUFSourceError(UnsupportedFormatError):
    """The source is a GGUF file, or holds GGUF files and no other weights. Some commands dequantise it.

    Args:
        source: the source, as the user named it.
        names: the GGUF files in it, relative to its folder or repository; empty where it is a file itself.
    """

    def __init__(self, source: str, names: Sequence[str] = ()) -> None:
        self.source, self.names = source, tuple(names)
        named = f" (found {names[0]})" if names else ""
        file = f"{source}/{names[0]}" if len(names) == 1 else f"{source}/FILE{SUFFIX}" if names else source
        what = "GGUF files and no other weights" if names else "a GGUF file"
        super().__init__(
            f"{source} {'holds' if names else 'is'} {what}{named}: `gqa-convert restate {file} PLAIN` writes it dequantised as an ordinary "
            "checkpoint, which every command reads"
        )


def choose_gguf(source: str, names: Iterable[str]) -> str:
    """The one GGUF file among those of a folder or repository that holds a model.

    Args:
        source: the folder or repository in messages.
        names: the files' names in it.

    Raises:
        UnsupportedFormatError: there are several.
    """
    models = [name for name in sorted(names) if not name.rpartition("/")[2].startswith(_NO_MODELS)]
    whole = [name for name in models if not (part := _PART.search(name)) or part[1] == "00001"]
    if len(whole) == 1:
        return whole[0]
    listed = ", ".join(whole[:_NAMED]) + (f" and {len(whole) - _NAMED} more" if len(whole) > _NAMED else "")
    raise UnsupportedFormatError(
        f"{source} holds {len(whole)} GGUF models ({listed}): name one of them, as {source}/{whole[0]}"
        if whole
        else f"{source} holds GGUF files and no model among them (found {', '.join(sorted(names)[:_NAMED])}): name another source"
    )


def is_hub_file(source: str) -> bool:
    """Whether a name has the form of a file in a repository: `org/name/FILE.gguf`."""
    return _HUB_FILE.fullmatch(source) is not None


def locate_gguf(found: GGUFSourceError, revision: str | None) -> "GGUFModel":
    """The GGUF file that a source means, on this machine: one in a repository on the Hub is downloaded.

    Args:
        found: what opening the source raised.
        revision: branch, tag or commit on the Hub.

    Raises:
        UnsupportedFormatError: it holds several, or a part of one.
        GQAConvertError: others of its subclasses, as `read_gguf`.
    """
    check_gguf_installed()
    path = local_path(found.source)
    if path.exists() and revision is not None:
        raise SourceNotFoundError(f"{found.source} is local and has no revision {revision!r}: omit --revision")
    if path.is_file():
        return read_gguf(path, found.source, None)
    if path.is_dir():
        name = choose_gguf(found.source, found.names)
        return read_gguf(path / name, f"{found.source.rstrip('/')}/{name}", None)
    from gqa_convert.checkpoint.hub import download_file

    if match := _HUB_FILE.fullmatch(found.source):
        repository, name = match["repository"], match["file"]
    else:
        repository, name = found.source, choose_gguf(found.source, found.names)
    try:
        file = download_file(repository, name, revision)
    except SourceNotFoundError as problem:
        raise SourceNotFoundError(f"there is no local file {repository}/{name}, and {problem}") from None
    places = file.parts  # in the Hub's cache: .../snapshots/COMMIT/name
    commit = places[places.index("snapshots") + 1] if "snapshots" in places else revision
    return read_gguf(file, f"{repository}/{name}", commit)


def is_quantised(tensor_type: str) -> bool:
    """Whether a type of GGUF's tensors, such as `Q4_K` or `F16`, is a quantised one."""
    return tensor_type not in _FLOATS


@dataclass(frozen=True)
class GGUFModel:
    """What the header of a GGUF file says of its tensors."""

    file: Path
    source_id: str
    """The file, as the user named it."""
    revision: str | None
    """The commit on the Hub, or None for a local file."""
    architecture: str
    types: tuple[tuple[str, int], ...]
    """The types of its tensors, such as `Q4_K`, each with the numbers that it holds; the most used first."""

    @property
    def numbers(self) -> int:
        """The numbers in all tensors."""
        return sum(count for _, count in self.types)

    @property
    def quantisation(self) -> str:
        """The type of most numbers."""
        return self.types[0][0]

    @property
    def dtype(self) -> str:
        """The type that its weights are written in: its own where they are not quantised, else bfloat16."""
        return _FLOATS.get(self.quantisation, "bfloat16")

    @property
    def is_quantised(self) -> bool:
        """Whether most numbers are quantised."""
        return is_quantised(self.quantisation)

    @property
    def record(self) -> JsonObject:
        """What the record of a conversion says of it."""
        return {
            "file": self.file.name,
            "bytes": self.file.stat().st_size,
            "quantisation": self.quantisation,
            "dtype": self.dtype,
        }

    @property
    def plain_bytes(self) -> int:
        """The bytes of the dequantised weights, about."""
        return self.numbers * (4 if self.dtype == "float32" else 2)


def read_gguf(file: Path, source_id: str, revision: str | None) -> GGUFModel:
    """Read the header of a GGUF file.

    Args:
        file: on this machine.
        source_id: the file, as the user named it.
        revision: the commit on the Hub.

    Raises:
        MissingExtraError: the package `gguf` is not installed.
        UnsupportedFormatError: the file is one part of a model.
        CorruptCheckpointError: it is damaged, or not a GGUF file.
    """
    check_gguf_installed()
    if part := _PART.search(file.name):
        raise UnsupportedFormatError(
            f"{source_id} is part {int(part[1])} of {int(part[2])}: join the parts with llama.cpp's `llama-gguf-split --merge "
            f"{file.name} whole{SUFFIX}`, and name the whole file"
        )
    with file.open("rb") as opened:
        magic = opened.read(len(_MAGIC))
    if magic != _MAGIC:
        raise CorruptCheckpointError(
            f"{source_id} does not begin with GGUF's mark, so that it is damaged or no GGUF file: download or copy it again"
        )
    try:
        architecture, types = _read(file)
    except Exception as problem:  # the reader raises whatever numpy does
        detail = next((line for line in str(problem).splitlines() if line.strip()), type(problem).__name__)
        raise CorruptCheckpointError(
            f"{source_id} is truncated or damaged ({detail[:160]}): download or copy it again"
        ) from None
    return GGUFModel(file, source_id, revision, architecture, types)


def _read(file: Path) -> tuple[str, tuple[tuple[str, int], ...]]:
    from gguf import GGUFReader

    reader: Any = GGUFReader(str(file))
    counts: Counter[str] = Counter()
    for tensor in reader.tensors:
        counts[tensor.tensor_type.name] += int(tensor.n_elements)
    return str(reader.fields["general.architecture"].contents()), tuple(counts.most_common())


def check_gguf_installed() -> None:
    """Raise MissingExtraError without the package that reads GGUF."""
    if find_spec("gguf") is None:
        raise MissingExtraError(
            "GGUF files need the package gguf, which is not installed: pip install 'gqa-convert[gguf]'"
        )
