"""The repository on the Hub: lists its files, uploads to it, and compares what arrived."""

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

from gqa_convert.checkpoint import formats
from gqa_convert.checkpoint.ownership import some
from gqa_convert.errors import GQAConvertError, InterruptedRunError, PublishError, UploadError
from gqa_convert.hub.files import HashedFile
from gqa_convert.hub.options import PublishOptions

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, ModelCard
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

_TIMEOUT_SECONDS = 30
_SHOWN_CHARACTERS = 300


def url_of(repo_id: str) -> str:
    """The address of a repository."""
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{repo_id}"


def own_token() -> str | None:
    """The token of `hf auth login` or of the environment; None without one that can be read."""
    from huggingface_hub import get_token

    try:
        token = get_token()
    except OSError:  # the home folder is another user's
        return None
    return str(token) if token else None


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
        self._url = url_of(options.repo_id)
        self._files: dict[str, RepoSibling] = {}

    def read(self) -> bool | None:
        """List the files of the branch, and return whether the repository is private; None for a new one that will be
        as its organisation has it.

        Raises:
            PublishError: it is public and --private was given, or there is nothing to open a pull request against.
            UploadError: the Hub can't be reached.
        """
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        options, info = self._options, None
        with self._explained():
            try:
                info = self._info(None)
                if options.revision is not None:
                    info = self._info(options.revision)
            except (RepositoryNotFoundError, RevisionNotFoundError):  # a new branch begins as the main one
                if options.is_pull_request:
                    raise PublishError(
                        f"{self._url} has no {options.revision or 'main branch'} that you can see, so no pull request is possible: leave "
                        "--revision and --create-pr out"
                    ) from None
        if info is None:
            return True if options.private else None
        if options.private and not info.private:
            raise PublishError(f"{self._url} exists and is public: make it private on the Hub, or leave --private out")
        self._files = _files_of(info)
        return bool(info.private)

    def check_weights(self, names: Sequence[str]) -> list[str]:
        """Check the weights that the repository holds besides these files, and return warnings.

        Raises:
            PublishError: other weights there would be loaded in place of these.
        """
        other = sorted(name for name in self._files if name not in names and formats.is_weight_file(name))
        chosen = formats.choose_weights(names, "the checkpoint")
        if formats.choose_weights([*names, *other], self._url) != chosen:
            raise PublishError(
                f"{self._url} holds {other[0]}, which would be loaded in place of {chosen}: delete it there, or name another repository"
            )
        return [f"{self._url} also holds weights of another model, which stay: {some(other)}"] if other else []

    def check_card(self, card: "ModelCard") -> list[str]:
        """The Hub's warnings about a card's metadata.

        Raises:
            PublishError: the Hub rejects the metadata.
            UploadError: the Hub can't be reached.
        """
        with warnings.catch_warnings(record=True) as found, self._explained():
            warnings.simplefilter("always")
            try:
                card.validate()
            except ValueError as problem:
                raise PublishError(
                    f"the Hub rejects the card's metadata ({self._shown(problem)}): check --license and --base-model"
                ) from None
        return [self._shown(each.message) for each in found if each.category is UserWarning]

    def find_replaced(self, files: Sequence[HashedFile]) -> list[str]:
        """The paths whose content in the repository differs."""
        known = [file for file in files if file.path in self._files]
        return [file.path for file in known if not file.is_same(self._files[file.path])]

    def upload(self, folder: Path, files: Sequence[HashedFile], message: str) -> "CommitInfo":
        """Create the repository and the branch if they are missing, upload files that the Hub does not have yet, and
        compare what it then holds with what was hashed.

        Raises:
            UploadError: the Hub can't be reached or refuses, and the same command resumes the upload; or a file is
                missing there or has other content.
        """
        options, again = self._options, "the same command"
        if options.create_pr:
            again = "with --revision refs/pr/N in place of --create-pr if a pull request is open"
        with self._explained(f"run {again} again: uploaded files are not sent twice"):
            if not options.create_pr:
                # None: as the organisation has it
                self._api.create_repo(options.repo_id, private=options.private or None, exist_ok=True)
            if options.revision is not None and not options.is_pull_request:
                self._api.create_branch(options.repo_id, branch=options.revision, exist_ok=True)
            commit = self._api.upload_folder(
                repo_id=options.repo_id,
                folder_path=folder,
                allow_patterns=[escape(file.path) for file in files],
                commit_message=message,
                revision=options.revision,
                create_pr=options.create_pr,
            )
        with self._explained("the files were sent but could not be compared"):
            arrived = _files_of(self._info(commit.oid))
        for file in files:
            if file.path not in arrived or not file.is_same(arrived[file.path]):
                raise UploadError(
                    f"{self._url} holds another {file.path} than the one that was checked, or none: do not change the folder, and publish again"
                )
        return commit

    def _info(self, revision: str | None) -> "ModelInfo":
        return self._api.model_info(
            self._options.repo_id, revision=revision, files_metadata=True, timeout=_TIMEOUT_SECONDS
        )

    @contextmanager
    def _explained(self, advice: str = "nothing was sent: try again later") -> Iterator[None]:
        """A context in which errors of the client become one line."""
        from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

        repo_id = self._options.repo_id
        try:
            yield
        except InterruptedRunError:  # raised by a signal, wherever the program is
            raise InterruptedRunError(f"stopped during a request to {self._url}; {advice}") from None
        except GQAConvertError:
            raise
        except Exception as problem:
            shown = self._shown(problem)
            forbidden = isinstance(problem, HfHubHTTPError) and problem.response.status_code in (401, 403)
            if forbidden or isinstance(problem, RepositoryNotFoundError):
                raise UploadError(
                    f"the Hub does not let you write to {repo_id} ({shown}): log in with `hf auth login` and a token with write access"
                ) from None
            raise UploadError(f"the Hub refused {repo_id} ({shown}); {advice}") from None

    def _shown(self, problem: BaseException | str) -> str:
        """A message of the client without the token, without passwords and signatures in addresses, and without the
        note on status codes.
        """
        text = " ".join(f"{problem}".replace(self._token, "***").split())
        text = re.sub(r" ?For more information check: \S+", "", text)
        text = re.sub(r"(https?://)(?:[^\s/@']*@)?([^\s?']*)(?:\?[^\s']*)?", r"\1\2", text)
        return text[:_SHOWN_CHARACTERS] or type(problem).__name__


def _files_of(info: "ModelInfo") -> "dict[str, RepoSibling]":
    return {item.rfilename: item for item in info.siblings or []}
