"""The fingerprint by which results of a checkpoint are known to be its own, wherever its folder lies."""

import hashlib
from pathlib import Path

from gqa_convert.checkpoint.formats import choose_weights
from gqa_convert.checkpoint.ownership import RECORD
from gqa_convert.checkpoint.source import CONFIG


def fingerprint(folder: Path) -> str:
    """Return SHA-256, in hexadecimal, of `config.json`, the record of a conversion, and what lists the weights.

    That is the index of the weights or, without one, the name and the size of the weight file: the weights themselves
    are not read. A model card does not count, since `publish` writes it later.

    Raises:
        UnsupportedFormatError, SourceNotFoundError: the folder holds no weights that transformers would load.
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    names = {path.name for path in folder.iterdir()}
    weights = choose_weights(names, str(folder))
    for name in (CONFIG, RECORD, weights):
        if name not in names:
            continue
        path = folder / name
        content = path.read_bytes() if name.endswith(".json") else str(path.stat().st_size).encode()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
