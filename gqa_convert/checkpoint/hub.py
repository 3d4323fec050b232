"""Checkpoints on the Hugging Face Hub: headers through range requests, or a full download through the Hub's cache."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.files import LocalFiles
from gqa_convert.errors import SourceNotFoundError

_CACHED_WHOLE_BYTES = 50_000_000
"""JSON files up to this size are downloaded into the Hub's cache; only the requested ranges of other files are."""

_PATIENCE_SECONDS = 10
_RETRIES = 2


class HubFiles:
    """The files of a Hub repository at one commit, read by range requests."""

    def __init__(self, repo_id: str, revision: str | None, commit: str, files: dict[str, int]) -> None:
        self.repo_id = repo_id
        self.revision = revision
        self.commit = commit
        self.sizes = files
        self.folder: Path | None = None
        self.links_out: tuple[str, ...] = ()

    def read(self, name: str, start: int, length: int) -> bytes:
        if length == 0:
            return b""
        if name.endswith(".json") and self.sizes[name] <= _CACHED_WHOLE_BYTES:
            from huggingface_hub import hf_hub_download

            path = _request(self.repo_id, hf_hub_download, self.repo_id, name, revision=self.commit)
            return Path(path).read_bytes()[start : start + length]
        return bytes(_request(self.repo_id, self._read_range, name, start, length))

    def _read_range(self, name: str, start: int, length: int) -> bytes:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

        url = hf_hub_url(self.repo_id, name, revision=self.commit)
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{start + length - 1}", "Accept-Encoding": "identity"}
        with http_stream_backoff(
            "GET", url, headers=headers, follow_redirects=True, timeout=_PATIENCE_SECONDS, max_retries=_RETRIES
        ) as answer:
            hf_raise_for_status(answer)
            # a server may ignore the range and send the file from its start
            skipped = 0 if answer.status_code == 206 else start
            result = bytearray()
            for chunk in answer.iter_bytes(1 << 16):
                result += chunk
                if len(result) >= skipped + length:
                    break
            return bytes(result[skipped : skipped + length])

    def download(self, leave_out: Iterable[str]) -> Path:
        """Download all files but `leave_out`, and return the snapshot's folder in the Hub's cache, named by commit."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

        patterns = [name.replace("[", "[[]") for name in leave_out] or None
        silence = not sys.stderr.isatty() and not are_progress_bars_disabled()
        if silence:
            disable_progress_bars()
        try:
            # by branch name, not by commit: only then does the cache know the branch without a network
            folder = _request(
                self.repo_id, snapshot_download, self.repo_id, revision=self.revision, ignore_patterns=patterns
            )
        finally:
            if silence:
                enable_progress_bars()
        return Path(folder)


def open_hub_files(repo_id: str, revision: str | None) -> tuple[HubFiles | LocalFiles, str]:
    """Return the files of a Hub id and its commit; without a network, those of a snapshot in the Hub's cache.

    Raises:
        SourceNotFoundError: there is no such repository, revision or access, or no network and no cached snapshot.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        raise SourceNotFoundError(
            f"{repo_id} is neither a local folder nor a Hub id of the form org/name: check the path"
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
        return LocalFiles(folder), folder.name
    files = {item.rfilename: item.size or 0 for item in info.siblings or []}
    visible = {name: size for name, size in files.items() if not any(part.startswith(".") for part in name.split("/"))}
    return HubFiles(repo_id, revision, str(info.sha), visible), str(info.sha)


def _cached_snapshot(repo_id: str, revision: str | None) -> Path | None:
    """Return the cached folder of a revision, which may be incomplete, or None."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo_id, revision=revision, local_files_only=True))
    except Exception as problem:  # newer versions of huggingface_hub report an incomplete snapshot in this way
        path = getattr(problem, "snapshot_path", None)
        return Path(path) if path else None


def _request(repo_id: str, call: Any, *arguments: Any, **options: Any) -> Any:
    """Call the Hub's client and turn its exceptions into one line."""
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
            f"{repo_id} is neither a local folder nor a Hub repository that you can access: check the name, or log in with `hf auth login`"
        )
    if isinstance(problem, RevisionNotFoundError):
        return SourceNotFoundError(f"{repo_id} has no such revision on the Hub: check --revision")
    detail = " ".join(str(problem).split())[:160] or type(problem).__name__
    unreachable = isinstance(problem, (ConnectionError, TimeoutError)) or "TransportError" in (
        kind.__name__ for kind in type(problem).__mro__
    )
    if unreachable:
        return SourceNotFoundError(
            f"{repo_id} is not a local folder, is not in the Hub's cache, and the Hub cannot be reached ({detail}): "
            "check the path or the network"
        )
    return SourceNotFoundError(
        f"the Hub did not provide {repo_id} ({detail}): try again later, or log in with `hf auth login`"
    )
