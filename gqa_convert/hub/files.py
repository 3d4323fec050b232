"""The files of an upload: their hashes, secrets in them, and what has changed since they were written."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gqa_convert.checkpoint import ownership
from gqa_convert.checkpoint.formats import is_weight_file
from gqa_convert.errors import PublishError
from gqa_convert.hub.converted import Converted

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

_SMALL_BYTES = 32 << 20
"""Files up to this size are searched for access tokens and have git's hash too: the Hub knows all larger ones by SHA-256."""
_TOKEN = re.compile(rb"\bhf_[A-Za-z0-9]{30,}")


@dataclass(frozen=True)
class HashedFile:
    """A file, with the hash by which the Hub knows large files (SHA-256) and that of small ones (git's)."""

    path: str
    bytes: int
    sha256: str
    git_blob: str

    def is_same(self, remote: "RepoSibling") -> bool:
        """Whether the Hub holds this content."""
        here, there = (self.sha256, remote.lfs.sha256) if remote.lfs else (self.git_blob, remote.blob_id)
        return bool(here == there)


def hash_file(folder: Path, name: str, token: str | None) -> HashedFile:
    """Read a file, and refuse it if it holds an access token of the Hub: the user's, or one that is known by its form.

    Raises:
        PublishError: it holds a token.
    """
    from huggingface_hub.utils.sha import git_hash

    path = folder / name
    content = path.read_bytes() if path.stat().st_size <= _SMALL_BYTES else b""
    if not is_weight_file(name):
        refuse_token(str(path), content, token)
    return HashedFile(name, **ownership.hash_file(path), git_blob=git_hash(content))


def refuse_token(where: str, content: bytes, token: str | None) -> None:
    """Raises:
    PublishError: the content holds an access token of the Hub.
    """
    if _TOKEN.search(content) or (token and token.encode() in content):
        raise PublishError(f"{where} holds an access token of the Hub: take it out of what was recorded, and revoke it")


def find_changes(model: Converted, files: Sequence[HashedFile]) -> list[str]:
    """Warnings about files that changed since convert or uptrain wrote them, and about weights of which that is unknown.

    Raises:
        PublishError: weights have changed.
    """
    changed, unknown = [], []
    for file in files:
        written = model.record.written.get(file.path)
        if written is None or written.get("sha256") == file.sha256:
            continue
        if "sha256" not in written:
            unknown.append(file.path)
        elif is_weight_file(file.path):
            raise PublishError(f"{model.folder / file.path} has changed since it was written: convert or copy it again")
        else:
            changed.append(file.path)
    warnings = []
    if changed:
        warnings.append(f"changed since the conversion: {ownership.some(changed)}")
    if unknown:
        warnings.append(
            f"{ownership.some(unknown)}: their hashes were not recorded, so changes since then would go unnoticed: check "
            f"with gqa-convert verify {model.folder} --source SOURCE"
        )
    return warnings
