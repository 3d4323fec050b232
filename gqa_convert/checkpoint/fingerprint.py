"""The fingerprint by which results of a checkpoint are known to be its own, wherever its folder
lies.
"""

import hashlib
import zipfile
from pathlib import Path

from .formats import choose_weights
from .provenance import PROVENANCE
from .source import CONFIG, Checkpoint, Shard

SCHEME = "v2-"
"""How a fingerprint begins: records of earlier results have others, which say nothing about these.
"""
_ZIP_HEADER = 160
"""Bytes that lie in front of a tensor in a zip archive, at most."""
_SAMPLE_BYTES, _PARTS = 4096, 16
"""Of the middle of every tensor in a fingerprint: two models of one architecture have files of
equal names and sizes.
"""


def fingerprint(checkpoint: Checkpoint) -> str:
    """A SHA-256, behind `SCHEME`, by which results of the same checkpoint are known, whatever its
    folder is called.

    It covers config.json, the record of a conversion, the index of the weights, and each weight
    file's name, size and a sample of every tensor; the model card and the tokenizer do not count.

    Args:
        checkpoint: in a local folder.
    """
    stored = checkpoint.stored
    folder = stored.local_folder
    digest = hashlib.sha256()
    for name in (CONFIG, PROVENANCE):
        if (folder / name).exists():
            digest.update(f"{name}\n".encode() + _hash(folder / name))
    # the index, where there is one
    weights = choose_weights(stored.sizes, stored.source_id)
    if weights.endswith(".json"):
        digest.update(_hash(folder / weights))
    # a sample of every tensor, since reading all of them takes minutes
    for shard in stored.shards:
        path = folder / shard.file
        sampled = hashlib.sha256(f"{shard.file} {shard.size}\n".encode())
        with path.open("rb", buffering=0) as file:
            for start, nbytes in _parts(path, shard):
                file.seek(start + max(0, nbytes - _SAMPLE_BYTES) // 2)
                sampled.update(file.read(min(nbytes, _SAMPLE_BYTES)))
        digest.update(sampled.digest())
    return SCHEME + digest.hexdigest()


def _hash(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def _parts(path: Path, shard: Shard) -> list[tuple[int, int]]:
    """The start and the bytes of what is sampled: the header and each tensor, or equal parts where
    their places are unknown.
    """
    if path.suffix == ".safetensors":
        tensors = [(entry.start, entry.nbytes) for entry in shard.tensors.values()]
        return [(0, tensors[0][0] if tensors else shard.size), *tensors]
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return [
                (record.header_offset, record.compress_size + _ZIP_HEADER)
                for record in archive.infolist()
            ]
    return [(shard.size * number // _PARTS, shard.size // _PARTS) for number in range(_PARTS)]
