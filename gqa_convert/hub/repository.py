"""The repository on the Hub, and the files of an upload: hashes, secrets in them, and what has changed since they were
written.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

from gqa_convert.checkpoint.formats import is_weight_file
from gqa_convert.errors import InterruptedRunError, PublishError, UploadError
from gqa_convert.hub.converted import Converted
from gqa_convert.hub.options import PublishOptions
from gqa_convert.publishing import ownership
from gqa_convert.runtime.messages import some

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
        here, there = (
            (self.sha256, remote.lfs.sha256) if remote.lfs else (self.git_blob, remote.blob_id)
        )
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
        raise PublishError(
            f"{where} holds an access token of the Hub: take it out of what was recorded, and revoke it"
        )


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
            raise PublishError(
                f"{model.folder / file.path} has changed since it was written: convert or copy it again"
            )
        else:
            changed.append(file.path)
    warnings = []
    if changed:
        warnings.append(f"changed since the conversion: {some(changed)}")
    if unknown:
        warnings.append(
            f"{some(unknown)}: their hashes were not recorded, so changes since then would go unnoticed: check "
            f"with gqa-convert verify {model.folder} --source SOURCE"
        )
    return warnings


_TIMEOUT_SECONDS = 30


class Repository:
    """A repository, accessed with the user's login.

    Args:
        options: where it is.
        token: of the login; it is removed from every message.

    Raises:
        PublishError: there is no token.
    """

    def __init__(self, options: PublishOptions, token: str | None) -> None:
        from huggingface_hub import HfApi

        if token is None:
            raise PublishError(
                "you are not logged in to the Hub: run `hf auth login` with a write token, or try --dry-run"
            )
        self._options, self._token, self._api = options, token, HfApi()

    def read(self, names: Sequence[str]) -> bool | None:
        """Return whether the repository is private; None for a new one that will be as its organisation has it.

        Args:
            names: files that it may get. Other weights in it could be loaded in place of them.

        Raises:
            PublishError: it is public and --private was given, or it holds other weights.
            UploadError: the Hub can't be reached.
        """
        from huggingface_hub.errors import RepositoryNotFoundError

        with self._explained("nothing was sent: try again later"):
            try:
                info = self._api.model_info(
                    self._options.repo_id, files_metadata=True, timeout=_TIMEOUT_SECONDS
                )
            except RepositoryNotFoundError:
                return self._options.private or None
        if self._options.private and not info.private:
            raise PublishError(
                f"{self._options.url} exists and is public: make it private on the Hub, or leave --private out"
            )
        there = {item.rfilename for item in info.siblings or []}
        other = sorted(filter(is_weight_file, there.difference(names)))
        if other:
            raise PublishError(
                f"{self._options.url} holds weights of another model, {some(other)}: delete them there, or name another repository"
            )
        return bool(info.private)

    def upload(self, folder: Path, files: Sequence[HashedFile], message: str) -> str:
        """Create the repository if it is missing, upload files that the Hub does not have yet, and compare what it then
        holds with what was hashed.

        Returns:
            The commit.

        Raises:
            UploadError: the Hub can't be reached or refuses, and the same command resumes the upload; or a file is
                missing there or has other content.
        """
        repo_id = self._options.repo_id
        with self._explained("run the same command again: uploaded files are not sent twice"):
            # None: as the organisation has it
            self._api.create_repo(repo_id, private=self._options.private or None, exist_ok=True)
            patterns = [escape(file.path) for file in files]
            commit = self._api.upload_folder(
                repo_id=repo_id, folder_path=folder, allow_patterns=patterns, commit_message=message
            )
        with self._explained("the files were sent but could not be compared"):
            info = self._api.model_info(
                repo_id, revision=commit.oid, files_metadata=True, timeout=_TIMEOUT_SECONDS
            )
        arrived = {item.rfilename: item for item in info.siblings or []}
        for file in files:
            if file.path not in arrived or not file.is_same(arrived[file.path]):
                raise UploadError(
                    f"{self._options.url} holds another {file.path} than the one that was checked, or none: do not change the folder, and publish again"
                )
        return str(commit.oid)

    @contextmanager
    def _explained(self, advice: str) -> Iterator[None]:
        """A context in which errors of the client become one line."""
        from huggingface_hub.errors import HfHubHTTPError

        try:
            yield
        except InterruptedRunError:  # raised by a signal, wherever the program is
            raise InterruptedRunError(
                f"stopped during a request to {self._options.url}; {advice}"
            ) from None
        except Exception as problem:
            if isinstance(problem, HfHubHTTPError) and problem.response.status_code in (
                401,
                403,
                404,
            ):
                advice = "log in with `hf auth login` and a token that may write there"
            text = str(problem).replace(self._token, "***")
            # without passwords and signatures in addresses
            text = re.sub(r"(https?://)(?:[^\s/@']*@)?([^\s?']*)(?:\?[^\s']*)?", r"\1\2", text)
            raise UploadError(
                f"the Hub refused {self._options.repo_id} ({text}); {advice}"
            ) from None
