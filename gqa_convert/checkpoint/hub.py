"""A checkpoint on the Hugging Face Hub: its headers by range requests, or the whole of it through the Hub's cache."""

from pathlib import Path
from typing import Any

from gqa_convert.checkpoint import formats
from gqa_convert.checkpoint.store import FileStore, FolderStore
from gqa_convert.errors import CorruptCheckpointError, SourceNotFoundError

_CACHED_WHOLE_BYTES = 50_000_000
"""JSON files up to this size go through the Hub's cache; of everything else only the asked-for ranges travel."""


class HubStore:
    """The files of a Hub repository at one commit, read by range requests."""

    def __init__(self, repo_id: str, commit: str, files: dict[str, int]) -> None:
        self.repo_id = repo_id
        self.commit = commit
        self.files = files
        self.folder: Path | None = None

    def read(self, name: str, start: int, length: int) -> bytes:
        if length == 0:
            return b""
        if name.endswith(".json") and self.files[name] <= _CACHED_WHOLE_BYTES:
            from huggingface_hub import hf_hub_download

            raw = _asking(self.repo_id, hf_hub_download, self.repo_id, name, revision=self.commit)
            return Path(raw).read_bytes()[start : start + length]
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

        url = hf_hub_url(self.repo_id, name, revision=self.commit)
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{start + length - 1}"}
        answer: Any = _asking(self.repo_id, http_backoff, "GET", url, headers=headers, follow_redirects=True)
        _asking(self.repo_id, hf_raise_for_status, answer)
        if answer.status_code != 206 and len(answer.content) > length:
            raise CorruptCheckpointError(f"the server of {self.repo_id} ignores range requests: download the repository and name the folder")
        return bytes(answer.content)


def open_hub_store(source: str, revision: str | None, *, download: bool) -> tuple[FileStore, str | None]:
    """The store for a Hub id and the commit it stands for.

    Without network access a snapshot in the Hub's cache serves, if it is there.

    Raises:
        SourceNotFoundError: no such repository, revision or access; or no network and nothing in the cache.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(source)
    except HFValidationError:
        raise SourceNotFoundError(f"{source} is neither a folder nor a Hub id of the form org/name: check the path") from None
    try:
        info = HfApi().model_info(source, revision=revision, files_metadata=True)
    except Exception as problem:
        if not _is_unreachable(problem, OfflineModeIsEnabled):
            raise _explained(source, problem) from None
        try:
            folder = Path(snapshot_download(source, revision=revision, local_files_only=True))
        except (LocalEntryNotFoundError, OfflineModeIsEnabled, OSError):
            raise SourceNotFoundError(
                f"{source} is no folder, and as a Hub id it is neither in the cache nor can the Hub be reached: check the path or the network"
            ) from None
        return FolderStore(folder), folder.name
    files = {item.rfilename: item.size or 0 for item in info.siblings or []}
    if not download:
        return HubStore(source, str(info.sha), files), info.sha
    formats.choose_weights(files, source)
    left_out = [name for name in files if formats.is_weight_file(name) and not _is_chosen_kind(name, files)]
    folder = Path(_asking(source, snapshot_download, source, revision=info.sha, ignore_patterns=left_out or None))
    return FolderStore(folder), info.sha


def _is_chosen_kind(name: str, files: dict[str, int]) -> bool:
    """Whether a weight file belongs to the set that will be read: safetensors, or `.bin` where there is nothing else."""
    chosen = formats.choose_weights(files, "")
    if chosen in (formats.SAFETENSORS_SINGLE, formats.TORCH_SINGLE):
        return name == chosen
    if chosen == formats.SAFETENSORS_INDEX:
        return "/" not in name and (name == chosen or name.endswith(".safetensors") and not name.startswith("consolidated"))
    return "/" not in name and (name == chosen or name.endswith(".bin"))


def _is_unreachable(problem: Exception, offline: type[Exception]) -> bool:
    """Whether the Hub did not answer at all, as opposed to answering no."""
    return isinstance(problem, (offline, ConnectionError, TimeoutError)) or any(
        kind.__name__ in ("TransportError", "ConnectError") for kind in type(problem).__mro__
    )


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
        return SourceNotFoundError(f"{repo_id} is neither a folder here nor a repository on the Hub that you can see: check the name, or log in")
    if isinstance(problem, RevisionNotFoundError):
        return SourceNotFoundError(f"{repo_id} has no such revision: check --revision")
    first_line = next(iter(str(problem).splitlines()), type(problem).__name__)
    return SourceNotFoundError(f"{repo_id} can't be read from the Hub ({first_line[:160]}): check the network and try again")
