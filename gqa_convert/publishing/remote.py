"""The repository on the Hub: what it holds, sending files to it, and looking whether they have arrived."""

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
        private: whether a new repository is to be so.
        create_pr: open a pull request in place of a commit.
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
    """Look at what can be looked at without a network.

    Raises:
        PublishError: the id has another form, or options contradict each other.
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
            f"--repo-id {place.repo_id!r} is no name of a repository: write org/name, of letters, digits, '-', '_' and '.'"
        )
    revision = place.revision
    if revision is not None and (
        not revision.strip("/")
        or any(char in " ~^:?*[\\\"'" or not char.isprintable() for char in revision)
        or ".." in revision
    ):
        raise PublishError(
            f"--revision {revision!r} is no name of a branch: write letters, digits, '-', '_', '.' and '/'"
        )
    if place.create_pr and revision is not None:
        raise PublishError(
            "--create-pr opens a pull request against the main branch: leave --revision out; to go on with one, give refs/pr/N there"
        )


def own_token() -> str | None:
    """The token of the Hub's own login or its environment variable."""
    from huggingface_hub import get_token

    found = get_token()
    return str(found) if found else None


class Repository:
    """A repository, asked with the user's own login.

    Args:
        place: where it is.
        token: the login's, which is taken out of every message.

    Raises:
        PublishError: there is no token.
    """

    def __init__(self, place: Place, token: str | None) -> None:
        from huggingface_hub import HfApi

        if token is None:
            raise PublishError(
                "you are not logged in to the Hub: run `hf auth login` with a token that may write, or try --dry-run"
            )
        self.place, self._token, self._api = place, token, HfApi()

    def look(self) -> dict[str, Digest] | None:
        """The files that are there, by path; None if the repository is not there yet.

        Raises:
            PublishError: it is public and was to be private, or there is nothing to open a pull request against.
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
                    f"{place.url} is not there, or not yours to see, so that no pull request can be: leave {option} out"
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
            PublishError: it would not take it.
            UploadError: it can't be reached.
        """
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            try:
                card.validate()
            except ValueError as problem:
                raise PublishError(
                    f"the Hub does not take the card's metadata ({self._clean(problem)}): check --license and --base-model"
                ) from None
            except Exception as problem:
                raise self._explained(problem) from None
        return [self._shown(str(each.message)) for each in found if "metadata" in str(each.message).lower()]

    def send(self, folder: Path, names: Sequence[str], message: str) -> Any:
        """Make the repository and the branch if need be, and upload files; what the Hub has already is not sent again.

        Returns:
            The Hub's account of the commit.

        Raises:
            UploadError: the Hub can't be reached or refuses; the same command goes on.
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
            raise self._explained(problem, f"; run {again} again: what has arrived is not sent twice") from None

    def check_arrived(self, commit: str, files: Sequence[Digest]) -> None:
        """Compare what the Hub holds at a commit with what was sent.

        Raises:
            UploadError: a file is missing there or is another.
        """
        try:
            found = _files(self._info(commit))
        except Exception as problem:
            raise self._explained(problem, "; the files were sent, and could not be compared") from None
        for file in files:
            there = found.get(file.path)
            if there is None:
                raise UploadError(
                    f"{self.place.url} lacks {file.path} after the upload: see whether a .gitignore there leaves it out, and publish again"
                )
            if differs(there, file):
                raise UploadError(
                    f"{self.place.url} holds another {file.path} than the one that was checked: leave the folder alone, and publish again"
                )

    def _explained(self, problem: Exception, advice: str = "") -> GQAConvertError:
        """One line for what the client raised."""
        from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

        if isinstance(problem, InterruptedRunError):  # raised by a signal, wherever the program is
            return InterruptedRunError(
                f"stopped while speaking with {self.place.url}" + (advice or "; nothing was sent")
            )
        status = (
            problem.response.status_code
            if isinstance(problem, HfHubHTTPError) and problem.response is not None
            else None
        )
        detail = self._clean(problem)
        if isinstance(problem, RepositoryNotFoundError) or status in (401, 403):
            return UploadError(
                f"the Hub does not let you write to {self.place.repo_id} ({detail}): log in with `hf auth login` and a token that may write there"
            )
        return UploadError(f"the Hub did not take {self.place.repo_id} ({detail})" + (advice or "; try again later"))

    def _clean(self, problem: BaseException) -> str:
        cause = problem.__cause__
        text = f"{problem} {cause}" if cause is not None and str(cause) not in str(problem) else str(problem)
        return self._shown(text) or type(problem).__name__

    def _shown(self, text: str) -> str:
        return _public(" ".join(text.replace(self._token, "***").split()))[:300]


def _public(text: str) -> str:
    """The text without what addresses hold of names, passwords and signatures, and without the client's lesson on
    status codes.
    """
    text = re.sub(r" ?For more information check: \S+", "", text)
    return re.sub(r"(https?://)(?:[^\s/@']*@)?([^\s?']*)(?:\?[^\s']*)?", r"\1\2", text)


def differs(there: Digest, here: Digest) -> bool:
    """Whether two files are known to be different."""
    if there.sha256:
        return there.sha256 != here.sha256
    return there.blob != here.blob if there.blob else there.size != here.size


def check_weights(place: Place, there: dict[str, Digest], names: Sequence[str]) -> list[str]:
    """What the repository holds beside these files and would be taken for this model's.

    Returns:
        What the publisher should know.

    Raises:
        PublishError: other weights there would be loaded in place of these.
    """
    other = sorted(name for name in there if name not in names and formats.is_weight_file(name))
    chosen = formats.choose_weights(names, "the checkpoint")
    if formats.choose_weights({*names, *other}, place.repo_id) != chosen:
        raise PublishError(
            f"{place.url} holds {other[0]}, which would be loaded in place of {chosen}: delete it there, or name another repository"
        )
    return [f"{place.url} also holds weights that are not this model's and stay: {some(other)}"] if other else []


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
    """Bars on a terminal only, and nothing of the client's own talk."""
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
