"""A checkpoint on the Hugging Face Hub: its headers by range requests, or the whole of it through the Hub's cache."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.store import FolderStore
from gqa_convert.errors import SourceNotFoundError

_CACHED_WHOLE_BYTES = 50_000_000
"""JSON files up to this size go through the Hub's cache; of everything else only the asked-for ranges travel."""

_PATIENCE_SECONDS = 10
_RETRIES = 2


class HubStore:
    """The files of a Hub repository at one commit, read by range requests."""

    def __init__(self, repo_id: str, revision: str | None, commit: str, files: dict[str, int]) -> None:
        self.repo_id = repo_id
        self.revision = revision
        self.commit = commit
        self.files = files
        self.folder: Path | None = None

    def read(self, name: str, start: int, length: int) -> bytes:
        if length == 0:
            return b""
        if name.endswith(".json") and self.files[name] <= _CACHED_WHOLE_BYTES:
            from huggingface_hub import hf_hub_download

            path = _asking(self.repo_id, hf_hub_download, self.repo_id, name, revision=self.commit)
            return Path(path).read_bytes()[start : start + length]
        return bytes(_asking(self.repo_id, self._read_range, name, start, length))

    def _read_range(self, name: str, start: int, length: int) -> bytes:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

        url = hf_hub_url(self.repo_id, name, revision=self.commit)
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{start + length - 1}", "Accept-Encoding": "identity"}
        with http_stream_backoff(
            "GET", url, headers=headers, follow_redirects=True, timeout=_PATIENCE_SECONDS, max_retries=_RETRIES
        ) as answer:
            hf_raise_for_status(answer)
            skipped = (
                0 if answer.status_code == 206 else start
            )  # a server may ignore the range and send all from the start
            result = bytearray()
            for chunk in answer.iter_bytes(1 << 16):
                result += chunk
                if len(result) >= skipped + length:
                    break
            return bytes(result[skipped : skipped + length])

    def download(self, leave_out: Iterable[str]) -> Path:
        """The snapshot's folder in the Hub's cache, without the named files; its name is the commit."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

        patterns = [name.replace("[", "[[]") for name in leave_out] or None
        silence = not sys.stderr.isatty() and not are_progress_bars_disabled()
        if silence:
            disable_progress_bars()
        try:
            # by the branch's name, not the commit: only so does the cache know the branch when there is no network
            folder = _asking(
                self.repo_id, snapshot_download, self.repo_id, revision=self.revision, ignore_patterns=patterns
            )
        finally:
            if silence:
                enable_progress_bars()
        return Path(folder)


def open_hub_store(repo_id: str, revision: str | None) -> tuple[HubStore | FolderStore, str]:
    """The store for a Hub id, and the commit it stands for; without network access a snapshot in the Hub's cache.

    Raises:
        SourceNotFoundError: no such repository, revision or access; or no network and nothing in the cache.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        raise SourceNotFoundError(
            f"{repo_id} is neither a folder here nor a Hub id of the form org/name: check the path"
        ) from None
    try:
        info = HfApi().model_info(repo_id, revision=revision, files_metadata=True, timeout=_PATIENCE_SECONDS)
    except Exception as problem:
        status = problem.response.status_code if isinstance(problem, HfHubHTTPError) else None
        if status is not None and status < 500:
            raise _explained(repo_id, problem) from None
        folder = _cached_snapshot(repo_id, revision)
        if folder is None:
            raise _explained(repo_id, problem) from None
        return FolderStore(folder), folder.name
    files = {item.rfilename: item.size or 0 for item in info.siblings or []}
    visible = {name: size for name, size in files.items() if not any(part.startswith(".") for part in name.split("/"))}
    return HubStore(repo_id, revision, str(info.sha), visible), str(info.sha)


def _cached_snapshot(repo_id: str, revision: str | None) -> Path | None:
    """The cache's folder for a revision; files may be lacking in it."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo_id, revision=revision, local_files_only=True))
    except Exception as problem:  # the newer of the client's versions tell of an incomplete snapshot in this way
        path = getattr(problem, "snapshot_path", None)
        return Path(path) if path else None


def _asking(repo_id: str, call: Any, *arguments: Any, **options: Any) -> Any:
    """Call the Hub's client; what it raises becomes one line."""
    try:
        return call(*arguments, **options)
    except Exception as problem:
        raise _explained(repo_id, problem) from None


def _explained(repo_id: str, problem: Exception) -> SourceNotFoundError:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(problem, GatedRepoError):
        return SourceNotFoundError(f"{repo_id} is gated: accept its terms on the Hub and log in with `hf auth login`")
    if isinstance(problem, RepositoryNotFoundError):
        return SourceNotFoundError(
            f"{repo_id} is neither a folder here nor a repository on the Hub that you can see: check the name, or log in"
        )
    if isinstance(problem, RevisionNotFoundError):
        return SourceNotFoundError(f"{repo_id} has no such revision on the Hub: check --revision")
    detail = " ".join(str(problem).split())[:160] or type(problem).__name__
    unreachable = isinstance(problem, (ConnectionError, TimeoutError)) or "TransportError" in (
        kind.__name__ for kind in type(problem).__mro__
    )
    if unreachable:
        return SourceNotFoundError(
            f"{repo_id} is no folder here, and the Hub can't be reached, nor does its cache hold it ({detail}): "
            "check the path or the network"
        )
    return SourceNotFoundError(
        f"the Hub would not give {repo_id} ({detail}): try again later, or log in with `hf auth login`"
    )
