"""The fingerprint by which results of a checkpoint are known to be its own, wherever its folder lies."""

import hashlib
import zipfile
from pathlib import Path

from gqa_convert.checkpoint.formats import choose_weights
from gqa_convert.checkpoint.headers import LENGTH_BYTES, header_bytes, parse_header
from gqa_convert.checkpoint.ownership import RECORD
from gqa_convert.checkpoint.strict_json import parse_object
from gqa_convert.errors import CorruptCheckpointError

SCHEME = "v2-"
"""How a fingerprint begins: records of earlier results have others, which say nothing about these."""
_ZIP_HEADER = 160
"""Bytes that lie in front of a tensor in a zip archive, at most."""
_SAMPLE_BYTES, _PARTS = 4096, 16
"""Of the middle of every tensor in a fingerprint: two models of one architecture have files of equal names and sizes."""


def fingerprint(folder: Path) -> str:
    """A SHA-256, behind `SCHEME`, by which results of the same checkpoint are known, whatever its folder is called.

    It covers config.json, the record of a conversion, the index of the weights, and each weight file's name, size and
    a sample of every tensor; the model card and the tokenizer do not count.

    Raises:
        GQAConvertError: the folder holds no checkpoint, or a file of it can't be read.
    """
    digest = hashlib.sha256()
    try:
        weights = choose_weights([path.name for path in folder.iterdir()], str(folder))
        shards = [weights]
        for name in ("config.json", RECORD):
            if (folder / name).exists():
                digest.update(f"{name}\n".encode() + hashlib.sha256((folder / name).read_bytes()).digest())
        if weights.endswith(".json"):
            index = (folder / weights).read_bytes()
            digest.update(hashlib.sha256(index).digest())
            shards = sorted(set(parse_object(index, weights)["weight_map"].values()))
        for name in shards:
            digest.update(_sampled(folder / name))
    except OSError as problem:
        raise CorruptCheckpointError(f"{problem.filename} can't be read ({problem.strerror}): copy it again") from None
    return SCHEME + digest.hexdigest()


def _sampled(path: Path) -> bytes:
    size = path.stat().st_size
    digest = hashlib.sha256(f"{path.name} {size}\n".encode())
    with path.open("rb", buffering=0) as file:
        for start, nbytes in _parts(path, size):
            file.seek(start + max(0, nbytes - _SAMPLE_BYTES) // 2)
            digest.update(file.read(min(nbytes, _SAMPLE_BYTES)))
    return digest.digest()


def _parts(path: Path, size: int) -> list[tuple[int, int]]:
    """The start and the bytes of what is sampled: the header and each tensor, or equal parts where their places are unknown."""
    if path.suffix == ".safetensors":
        with path.open("rb") as file:
            length = header_bytes(file.read(LENGTH_BYTES), size)
            file.seek(0)
            tensors, _ = parse_header(file.read(length), size, str(path))
        return [(0, length), *((entry.start, entry.nbytes) for entry in tensors.values())]
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return [(record.header_offset, record.compress_size + _ZIP_HEADER) for record in archive.infolist()]
    return [(size * number // _PARTS, size // _PARTS) for number in range(_PARTS)]
