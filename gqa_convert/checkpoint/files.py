"""The files of a checkpoint: in a local folder, or on the Hugging Face Hub, of which headers can be
read without the weights.
"""

import glob
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from gqa_convert.errors import CorruptCheckpointError, SourceNotFoundError

from . import formats
from .headers import Header, TensorEntry, damaged, read_header
from .torch_files import describe_tensors

_PATIENCE_SECONDS = 10


@dataclass
class LocalFiles:
    """The files of a local folder, without hidden files, Python caches and a user's README that
    gave way to a card.

    Links to files are followed where they stay inside the folder or lead to the files that the
    Hub's cache keeps for the same repository. Other links may show any file of this machine, and
    they and links to folders are listed in `links_out`. Weights and the config may be links to any
    place: what is read from them is numbers and a model's description, and anything else is
    refused.

    Attributes:
        folder: the folder.
        name: what the user called it.
        commit: of a snapshot in the Hub's cache.
        unreachable: why the Hub was not asked for a newer one.
        sizes: size in bytes by path relative to it, with forward slashes.
        links_out: the links that are not followed.
    """

    folder: Path
    name: str
    commit: str | None = None
    unreachable: str | None = None

    def __post_init__(self) -> None:
        self.sizes: dict[str, int] = {}
        links_out = []
        for root, folders, names in os.walk(self.folder, onerror=raise_error):
            folders[:] = [name for name in folders if name != "__pycache__" and name[0] != "."]
            folders.sort()
            for name in sorted(folders + names):
                path = Path(root, name)
                relative = path.relative_to(self.folder).as_posix()
                may_lie_elsewhere = relative == "config.json" or formats.is_weight_file(relative)
                if name.startswith("."):
                    continue
                if path.is_symlink() and path.is_dir():
                    links_out.append(f"{relative}/")  # which could lead anywhere
                elif not may_lie_elsewhere and leads_out(path, self.folder):
                    links_out.append(relative)
                elif path.is_file():
                    self.sizes[relative] = path.stat().st_size
                elif path.is_symlink():
                    raise CorruptCheckpointError(
                        f"{path} is a broken link: download or copy the checkpoint again"
                    )
        self.links_out = tuple(sorted(links_out))

    def read(self, name: str) -> bytes:
        """Return the content of a small file."""
        return (self.folder / name).read_bytes()

    def read_header(self, name: str) -> Header:
        """Return the tensors of a weight file, in the order of their bytes, and its metadata.

        Raises:
            CorruptCheckpointError: the file is damaged.
        """
        path = self.folder / name
        return (describe_tensors(path), {}) if name.endswith(".bin") else read_header(path)


def raise_error(problem: OSError) -> NoReturn:
    """What `os.walk` does about a folder that can't be read, which it leaves out otherwise."""
    raise problem


def leads_out(path: Path, folder: Path) -> bool:
    """Return whether a path below a folder is a link, or leads through links, to a file elsewhere
    or to a hidden one.

    The folder may be a snapshot in the Hub's cache, whose links lead to the `blobs` beside the
    snapshots.
    """
    if not path.is_symlink():
        return False
    target = Path(os.path.realpath(path))
    root = Path(os.path.realpath(folder))
    if target.is_relative_to(root):
        return any(part.startswith(".") for part in target.relative_to(root).parts)
    blobs = (parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots")
    return target.parent not in (Path(os.path.realpath(each)) for each in blobs)


@dataclass
class HubFiles:
    """The files of a Hub repository at one commit, read as `LocalFiles` are.

    Attributes:
        name: the repository's id.
        revision: what the user asked for: a branch, a tag, a commit, or None for the main branch.
        commit: the commit that it stands for.
        sizes: size in bytes by path.
    """

    name: str
    revision: str | None
    commit: str
    sizes: dict[str, int]
    folder = None
    links_out = ()
    unreachable = None

    def read(self, name: str) -> bytes:
        from huggingface_hub import hf_hub_download

        with _explained(self.name):
            return Path(hf_hub_download(self.name, name, revision=self.commit)).read_bytes()

    def read_header(self, name: str) -> Header:
        from huggingface_hub import HfApi

        with _explained(self.name):
            found = HfApi().parse_safetensors_file_metadata(self.name, name, revision=self.commit)
        tensors = sorted(found.tensors.items(), key=lambda tensor: tensor[1].data_offsets)
        entries = {key: TensorEntry(tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors}
        return entries, found.metadata

    def download(self, leave_out: Iterable[str]) -> LocalFiles:
        """Download all files but `leave_out` into the Hub's cache."""
        from huggingface_hub import hf_hub_download, snapshot_download

        patterns = [glob.escape(name) for name in leave_out] or None
        with _explained(self.name):
            folder = snapshot_download(self.name, revision=self.commit, ignore_patterns=patterns)
            # by this the cache knows what the revision stands for, for runs without a network
            hf_hub_download(self.name, "config.json", revision=self.revision)
        return LocalFiles(Path(folder), self.name, self.commit)


CheckpointFiles = LocalFiles | HubFiles


def open_hub_files(repo_id: str, revision: str | None) -> CheckpointFiles:
    """Return the files of a Hub id; without a network, those of a snapshot in the Hub's cache.

    Raises:
        SourceNotFoundError: there is no such repository, revision or access, or no network and no
            cached snapshot.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    with _explained(repo_id):
        try:
            info = HfApi().model_info(
                repo_id, revision=revision, files_metadata=True, timeout=_PATIENCE_SECONDS
            )
        except Exception as problem:
            # no answer, or a failure of the server: a snapshot of an earlier run may serve
            if isinstance(problem, HfHubHTTPError) and problem.response.status_code < 500:
                raise
            folder = _cached_snapshot(repo_id, revision)
            if folder is None:
                raise
            unreachable = None if folder.name == revision else _detail(problem)
            return LocalFiles(folder, repo_id, folder.name, unreachable)
    files = info.siblings or []
    sizes = {each.rfilename: each.size or 0 for each in files if "/." not in f"/{each.rfilename}"}
    return HubFiles(repo_id, revision, str(info.sha), sizes)


def _cached_snapshot(repo_id: str, revision: str | None) -> Path | None:
    """Return the cached folder of a revision, which may be incomplete, or None."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo_id, revision=revision, local_files_only=True))
    except Exception as problem:
        # newer versions of huggingface_hub report an incomplete snapshot in this way
        path = getattr(problem, "snapshot_path", None)
        return Path(path) if path else None


@contextmanager
def _explained(repo_id: str) -> Iterator[None]:
    """A context in which errors of the Hub's client become one line."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
        SafetensorsParsingError,
    )

    login = "log in with `hf auth login`"
    try:
        yield
    except SafetensorsParsingError as problem:
        raise damaged(repo_id, problem) from None
    except HFValidationError:
        words = "is neither a local folder nor a Hub id of the form org/name: check the path"
    except GatedRepoError:
        words = f"is gated: accept its terms on the Hub and {login}"
    except RepositoryNotFoundError:
        words = (
            "is neither a local folder nor a Hub repository that you can access: "
            f"check the name, or {login}"
        )
    except RevisionNotFoundError:
        words = "has no such revision on the Hub: check --revision"
    except CorruptCheckpointError:  # of a cached snapshot
        raise
    except Exception as problem:
        words = (
            f"is not a local folder, and the Hub did not provide it ({_detail(problem)}): "
            f"check the path and the network, try again later, or {login}"
        )
    else:
        return
    raise SourceNotFoundError(f"{repo_id} {words}") from None


def _detail(problem: Exception) -> str:
    return " ".join(str(problem).split())[:160] or type(problem).__name__
