"""The fingerprint by which results of a checkpoint are known to be its own, wherever its folder lies."""

import hashlib
from pathlib import Path

from gqa_convert.checkpoint.formats import choose_weights
from gqa_convert.checkpoint.ownership import RECORD
from gqa_convert.checkpoint.strict_json import parse_object
from gqa_convert.errors import CorruptCheckpointError

_SAMPLES, _SAMPLE_BYTES = 16, 4096
"""Samples of each weight file in a fingerprint: two models of one architecture have files of equal names and sizes."""


def fingerprint(folder: Path) -> str:
    """A SHA-256 by which results of the same checkpoint are known, whatever its folder is called.

    It covers config.json, the record of a conversion, the index of the weights, and each weight file's name, size and
    some samples of its content; the model card and the tokenizer do not count.

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
    return digest.hexdigest()


def _sampled(path: Path) -> bytes:
    size = path.stat().st_size
    digest = hashlib.sha256(f"{path.name} {size}\n".encode())
    with path.open("rb") as file:
        for number in range(_SAMPLES):
            file.seek(size * number // _SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()
