"""The repository on the Hub: lists its files, uploads to it, and checks what arrived."""

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gqa_convert.checkpoint import formats
from gqa_convert.errors import GQAConvertError, InterruptedRunError, PublishError, UploadError
from gqa_convert.publishing.hashing import Digest
from gqa_convert.publishing.markup import some

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

_PATIENCE_SECONDS = 30


@dataclass(frozen=True)
class Place:
    """Where a checkpoint goes.

    Attributes:
        repo_id: of the form org/name.
        revision: a branch, or `refs/pr/N`; None for the main branch.
        private: whether to create a new repository as private.
        create_pr: open a pull request instead of committing.
    """

    repo_id: str
    revision: str | None = None
    private: bool = False
    create_pr: bool = False

    @property
    def url(self) -> str:
        from huggingface_hub import constants

        return _public(f"{constants.ENDPOINT}/{self.repo_id}")


def check_place(place: Place) -> None:
    """Check what can be checked without a network.

    Raises:
        PublishError: the id is malformed, or options contradict each other.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(place.repo_id)
    except HFValidationError:
        valid = False
    else:
        valid = place.repo_id.count("/") == 1
    if not valid:
        raise PublishError(
            f"--repo-id {place.repo_id!r} is not a repository name: write org/name with letters, digits, '-', '_' and '.'"
        )
    revision = place.revision
    if revision is not None and (
        not revision.strip("/")
        or any(char in " ~^:?*[\\\"'" or not char.isprintable() for char in revision)
        or ".." in revision
    ):
        raise PublishError(
            f"--revision {revision!r} is not a branch name: write letters, digits, '-', '_', '.' and '/'"
        )
    if place.create_pr and revision is not None:
        raise PublishError(
            "--create-pr opens a pull request against the main branch: leave --revision out; to add to an open one, give --revision refs/pr/N"
        )


def own_token() -> str | None:
    """The token of `hf auth login` or of the Hub's environment variable; None without one that can be read."""
    from huggingface_hub import get_token

    try:
        found = get_token()
    except OSError:  # the home folder is another user's
        return None
    return str(found) if found else None


class Repository:
    """A repository, accessed with the user's login.

    Args:
        place: where it is.
        token: of the login; it is removed from every message.

    Raises:
        PublishError: there is no token.
    """

    def __init__(self, place: Place, token: str | None) -> None:
        from huggingface_hub import HfApi

        if token is None:
            raise PublishError(
                "you are not logged in to the Hub: run `hf auth login` with a write token, or try --dry-run"
            )
        self.place, self._token, self._api = place, token, HfApi()

    def look(self) -> dict[str, Digest] | None:
        """The repository's files by path, None if it does not exist yet.

        Raises:
            PublishError: it is public and --private was given, or there is nothing to open a pull request against.
            UploadError: the Hub can't be reached.
        """
        from huggingface_hub.errors import RepositoryNotFoundError

        place = self.place
        try:
            info = self._info(None)
            if place.private and not info.private:
                raise PublishError(
                    f"{place.url} exists and is public: make it private on the Hub, or leave --private out"
                )
            return _files(
                info if place.revision is None else self._branch(place.revision) or info
            )  # a new branch begins as the main one
        except RepositoryNotFoundError:
            if place.create_pr or (place.revision or "").startswith("refs/"):
                option = "--create-pr" if place.create_pr else "--revision"
                raise PublishError(
                    f"{place.url} does not exist or is not visible to you, so no pull request is possible: leave {option} out"
                ) from None
            return None
        except PublishError:
            raise
        except Exception as problem:
            raise self._explained(problem) from None

    def _info(self, revision: str | None) -> Any:
        return self._api.model_info(
            self.place.repo_id, revision=revision, files_metadata=True, timeout=_PATIENCE_SECONDS
        )

    def _branch(self, revision: str) -> Any:
        """The state of a branch, None if there is none."""
        from huggingface_hub.errors import RevisionNotFoundError

        try:
            return self._info(revision)
        except RevisionNotFoundError:
            if revision.startswith("refs/"):
                raise PublishError(
                    f"{self.place.url} has no {revision}: open a pull request with --create-pr"
                ) from None
            return None

    def check_card(self, card: "ModelCard") -> list[str]:
        """The Hub's warnings about a card's metadata.

        Raises:
            PublishError: the Hub rejects the metadata.
            UploadError: the Hub can't be reached.
        """
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            try:
                card.validate()
            except ValueError as problem:
                raise PublishError(
                    f"the Hub rejects the card's metadata ({self._clean(problem)}): check --license and --base-model"
                ) from None
            except Exception as problem:
                raise self._explained(problem) from None
        return [self._shown(str(each.message)) for each in found if "metadata" in str(each.message).lower()]

    def send(self, folder: Path, names: Sequence[str], message: str) -> Any:
        """Create the repository and the branch if they are missing, and upload files that the Hub does not have yet.

        Returns:
            The Hub's description of the commit.

        Raises:
            UploadError: the Hub can't be reached or refuses; the same command resumes the upload.
        """
        place = self.place
        try:
            with _quiet():
                if not place.create_pr:
                    self._api.create_repo(
                        place.repo_id, private=place.private or None, exist_ok=True
                    )  # None: as the organisation has it
                if place.revision is not None and not place.revision.startswith("refs/"):
                    self._api.create_branch(place.repo_id, branch=place.revision, exist_ok=True)
                return self._api.upload_folder(
                    repo_id=place.repo_id,
                    folder_path=folder,
                    allow_patterns=[escape(name) for name in names],
                    commit_message=message,
                    revision=place.revision,
                    create_pr=place.create_pr,
                )
        except Exception as problem:
            again = (
                "with --revision refs/pr/N in place of --create-pr if a pull request is open"
                if place.create_pr
                else "the same command"
            )
            raise self._explained(problem, f"; run {again} again: uploaded files are not sent twice") from None

    def check_arrived(self, commit: str, files: Sequence[Digest]) -> None:
        """Compare what the Hub holds at a commit with what was sent.

        Raises:
            UploadError: a file is missing there or has other content.
        """
        try:
            found = _files(self._info(commit))
        except Exception as problem:
            raise self._explained(problem, "; the files were sent but could not be compared") from None
        for file in files:
            there = found.get(file.path)
            if there is None:
                raise UploadError(
                    f"{self.place.url} lacks {file.path} after the upload: check whether a .gitignore there excludes it, and publish again"
                )
            if differs(there, file):
                raise UploadError(
                    f"{self.place.url} holds another {file.path} than the one that was checked: do not change the folder, and publish again"
                )

    def _explained(self, problem: Exception, advice: str = "") -> GQAConvertError:
        """The client's error as one line."""
        from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

        if isinstance(problem, InterruptedRunError):  # raised by a signal, wherever the program is
            return InterruptedRunError(
                f"stopped during a request to {self.place.url}" + (advice or "; nothing was sent")
            )
        status = (
            problem.response.status_code
            if isinstance(problem, HfHubHTTPError) and problem.response is not None
            else None
        )
        detail = self._clean(problem)
        if isinstance(problem, RepositoryNotFoundError) or status in (401, 403):
            return UploadError(
                f"the Hub does not let you write to {self.place.repo_id} ({detail}): log in with `hf auth login` and a token with write access"
            )
        return UploadError(f"the Hub refused {self.place.repo_id} ({detail})" + (advice or "; try again later"))

    def _clean(self, problem: BaseException) -> str:
        cause = problem.__cause__
        text = f"{problem} {cause}" if cause is not None and str(cause) not in str(problem) else str(problem)
        return self._shown(text) or type(problem).__name__

    def _shown(self, text: str) -> str:
        return _public(" ".join(text.replace(self._token, "***").split()))[:300]


def _public(text: str) -> str:
    """The text without user names, passwords and signatures in addresses, and without the client's note on status
    codes.
    """
    text = re.sub(r" ?For more information check: \S+", "", text)
    return re.sub(r"(https?://)(?:[^\s/@']*@)?([^\s?']*)(?:\?[^\s']*)?", r"\1\2", text)


def differs(there: Digest, here: Digest) -> bool:
    """Whether two files are known to be different."""
    if there.sha256:
        return there.sha256 != here.sha256
    return there.blob != here.blob if there.blob else there.size != here.size


def check_weights(place: Place, there: dict[str, Digest], names: Sequence[str]) -> list[str]:
    """Check the weights that the repository holds besides these files.

    Returns:
        Warnings for the publisher.

    Raises:
        PublishError: other weights there would be loaded in place of these.
    """
    other = sorted(name for name in there if name not in names and formats.is_weight_file(name))
    chosen = formats.choose_weights(names, "the checkpoint")
    if formats.choose_weights({*names, *other}, place.repo_id) != chosen:
        raise PublishError(
            f"{place.url} holds {other[0]}, which would be loaded in place of {chosen}: delete it there, or name another repository"
        )
    return [f"{place.url} also holds weights of another model, which stay: {some(other)}"] if other else []


def _files(info: Any) -> dict[str, Digest]:
    found = {}
    for item in info.siblings or []:
        large = getattr(item, "lfs", None)
        found[item.rfilename] = Digest(
            item.rfilename, item.size or 0, large.sha256 if large else "", "" if large else item.blob_id or ""
        )
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """A context in which the client shows bars on a terminal only and prints nothing else."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, logging

    restore: list[Callable[[], None]] = []
    if not sys.stderr.isatty() and not are_progress_bars_disabled():
        disable_progress_bars()
        restore.append(enable_progress_bars)
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        for each in restore:
            each()
